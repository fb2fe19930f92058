"""One trial: a tiny model of one architecture is served on two ranks, with overlap as far as it goes, and compared."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.registry.tiny_configs import make_config

BASE = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_ENABLE_DEEP_GEMM": "0",
}
# Each step that can be is split, and computed a second time unsplit: a difference beyond rounding stops the engine.
OVERLAP = {"VLLM_ASCEND_ENABLE_DBO": "1", "DBO_MODE": "always", "DBO_CHECK": "1", "DBO_MIN_TOKENS": "2"}
SETTINGS: Mapping[str, Mapping[str, str]] = {
    "overlap": {**OVERLAP, "DBO_GENERIC": "1"},
    "no adapter": OVERLAP,
    "vLLM alone": {"VLLM_ASCEND_ENABLE_DBO": "0"},
}
LOAD_FORMAT = "registry_trial"
PROMPTS = (24, 9, 1)
TOKENS = 4
TOLERANCE = 1e-3  # of log-probabilities: DBO_CHECK compares hidden states, this only shows that the same was asked


def serve(architecture: str, side: str) -> dict[str, Any]:
    """Serve a tiny model of an architecture in a process of its own; return its answers, and how many steps were split.

    Where steps were split, the answers without are there as well.
    """
    os.environ.update({**BASE, **SETTINGS[side]})
    from vllm import LLM
    from vllm.model_executor.models import registry
    from vllm.v1.executor import multiproc_executor

    from dbo_runtime.lab.verify.load_format import register_load_format
    from dbo_runtime.lab.verify.verification import fill_weights

    register_load_format(LOAD_FORMAT, fill_weights)  # workers are forked: they have it, too
    config = make_config(architecture)
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(config))
        # Imports take longer than all the rest. Forked workers have done them, and what vLLM asks a process of its own
        # about a model, lest that initialize CUDA, this one may find out itself.
        with (
            patch.object(multiproc_executor, "get_mp_context", lambda: get_context("fork")),
            patch.object(registry, "_run_in_subprocess", lambda job: job()),
        ):
            llm = LLM(
                directory,
                load_format=LOAD_FORMAT,
                worker_extension_cls="dbo_runtime.vllm_plugin.extension.WorkerExtension",
                tensor_parallel_size=2,
                skip_tokenizer_init=True,
                enforce_eager=True,
                dtype="float32",
                max_model_len=128,
                max_num_batched_tokens=128,
                max_num_seqs=8,
                kv_cache_memory_bytes=1 << 26,
                attention_backend="CPU_MLA" if config.get("kv_lora_rank") else "CPU_ATTN",
                enable_prefix_caching=False,
                disable_log_stats=True,
                use_tqdm_on_load=False,
            )
        try:
            found = {"answers": answer(llm), "steps": [0]}
            if side == "vLLM alone":
                return found
            found["steps"] = [rank["split"] if rank else 0 for rank in llm.collective_rpc("dbo_statistics")]
            if any(found["steps"]):
                llm.collective_rpc("dbo_configure", args=({"DBO_MODE": "off"},))
                found["unsplit answers"] = answer(llm)
        finally:
            llm.llm_engine.engine_core.shutdown()
    return found


def answer(llm: Any) -> list[list[tuple[int, float]]]:
    """Return the tokens of each prompt's greedy answer, with their log-probabilities."""
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True, detokenize=False, logprobs=1)
    prompts = [{"prompt_token_ids": [3 + (7 * i + j * j) % 50 for j in range(n)]} for i, n in enumerate(PROMPTS)]
    return [
        [(token, entry[token].logprob) for token, entry in zip(completion.token_ids, completion.logprobs, strict=True)]
        for completion in (output.outputs[0] for output in llm.generate(prompts, sampling, use_tqdm=False))
    ]


def are_equal(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Return whether two runs answered alike, up to rounding; answers that are no numbers are equal to none."""
    pairs = [pair for a, b in zip(one, other, strict=True) for pair in zip(a, b, strict=True)]
    return all(math.isclose(p, q, abs_tol=TOLERANCE) and s == t for (s, p), (t, q) in pairs)
