"""Profile a few steps of the tiny DeepSeek with vLLM's own profiler: see `trim`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

TINY = Path(__file__).parents[4] / "examples" / "tiny-deepseek"
PROMPTS = 4
LENGTH = 60


def make_prompts(seed: int) -> list[dict[str, list[int]]]:
    """Return prompts of tokens that are in no prefix cache."""
    return [{"prompt_token_ids": [(7 * n + seed * j + j * j) % 250 + 3 for j in range(LENGTH)]} for n in range(PROMPTS)]


def main(mode: str, folder: str) -> None:
    """Serve, and profile the second round of prompts; *mode* is `split` or `vllm`."""
    settings = {"VLLM_ASCEND_ENABLE_DBO": "1", "DBO_MODE": "always"} if mode == "split" else {}
    os.environ.update(settings, OMP_NUM_THREADS="1", VLLM_CPU_OMP_THREADS_BIND="0|1")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # all prompts are there when the first step is scheduled
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(TINY),
        tensor_parallel_size=2,
        dtype="float32",
        attention_backend="CPU_MLA",
        enforce_eager=True,
        kv_cache_memory_bytes=1 << 27,
        max_model_len=512,
        profiler_config={
            "profiler": "torch",
            "torch_profiler_dir": folder,
            "torch_profiler_with_stack": False,
            "ignore_frontend": True,
        },
    )
    sampling = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
    llm.generate(make_prompts(1), sampling, use_tqdm=False)
    llm.start_profile()
    llm.generate(make_prompts(2), sampling, use_tqdm=False)
    llm.stop_profile()


if __name__ == "__main__":
    main(*sys.argv[1:])
