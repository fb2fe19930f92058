"""Record the batches that vLLM schedules for random traffic, as data for `bench_planning.py`.

    python -m tests.benchmarks.record_mix

serves `examples/tiny-deepseek` in this process and writes `recorded_mix.json`: of each step the tokens of its requests
and their contexts. Requests arrive while others run; a few share a prefix.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any
from unittest.mock import patch

MODEL = Path(__file__).parents[2] / "examples" / "tiny-deepseek"
FILE = Path(__file__).with_name("recorded_mix.json")
REQUESTS = 300
ARRIVALS_PER_STEP = 0.35
VOCABULARY = 300


def main() -> None:
    """Serve random requests, and write the steps."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_ASCEND_ENABLE_DBO": "1", "DBO_MODE": "always"}
    from vllm import LLM, SamplingParams

    from dbo_runtime.vllm_plugin.context.splitter import ContextSplitter

    steps: list[dict[str, list[int]]] = []
    read = ContextSplitter.read_batch

    def record(self: ContextSplitter, *arguments: Any) -> Any:
        batch = read(self, *arguments)
        steps.append({"query_lens": list(batch.query_lens), "context_lens": list(batch.contexts)})
        return batch

    with patch.object(ContextSplitter, "read_batch", record):
        llm = LLM(
            str(MODEL),
            dtype="float32",
            attention_backend="CPU_MLA",
            enforce_eager=True,
            max_model_len=4096,
            max_num_batched_tokens=4096,
            max_num_seqs=64,
            kv_cache_memory_bytes=1 << 29,
            enable_prefix_caching=True,
        )
        steps.clear()
        _serve(llm.llm_engine, SamplingParams)
    lines = ",\n".join(json.dumps(step, separators=(",", ":")) for step in steps)
    FILE.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    print(f"{len(steps)} steps of {REQUESTS} requests written to {FILE.name}")


def _serve(engine: Any, sampling_params: Any) -> None:
    rng = random.Random(0)
    shared = [rng.randrange(3, VOCABULARY) for _ in range(512)]
    added = 0
    while added < REQUESTS or engine.has_unfinished_requests():
        while added < REQUESTS and rng.random() < ARRIVALS_PER_STEP:
            length = min(int(rng.lognormvariate(5.8, 1.0)) + 1, 3000)
            prompt = [rng.randrange(3, VOCABULARY) for _ in range(length)]
            if rng.random() < 0.2:
                prompt = [*shared, *prompt]
            answer = min(int(rng.lognormvariate(3.2, 0.6)) + 1, 200)
            params = sampling_params(max_tokens=answer, ignore_eos=True, temperature=0.0)
            engine.add_request(str(added), {"prompt_token_ids": prompt}, params)
            added += 1
        if engine.has_unfinished_requests():
            engine.step()


if __name__ == "__main__":
    main()
