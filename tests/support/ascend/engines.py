"""Engines inside vllm-ascend, on the stand-in for CANN, each in processes of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dbo_runtime.vllm_plugin.api.known import LATEST_ASCEND
from dbo_runtime.vllm_plugin.platforms.npu import find_release
from tests.support.vllm.ranks import Ranks

TINY = Path(__file__).parents[3] / "examples" / "tiny-deepseek"
ENVIRONMENT = {
    "STANDIN_ASCEND": "1",
    "NPU_STANDIN_DEVICES": "2",
    "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:False",  # the stand-in has no virtual memory
    "CI": "",  # else torch refuses operators of vllm-ascend that it only warns of elsewhere
    "TORCHINDUCTOR_AUTOGRAD_CACHE": "0",  # vllm-ascend's compiler is made for an older torch than the stand-in needs
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # tests send functions to workers
    "VLLM_ASCEND_ENABLE_DBO": "1",
    "DBO_MODE": "off",
    "DBO_SPLIT": "micro",  # what most tests are of; others ask for nano-batches
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # the stand-in's streams are threads, which forks lose
    "VLLM_NO_USAGE_STATS": "1",
    # With an untested vLLM, first steps return what unsplit ones do, unless all are checked.
    **({} if find_release() == LATEST_ASCEND else {"DBO_CHECK": "1"}),
}
OPTIONS: dict[str, Any] = {
    "dtype": "bfloat16",
    "attention_backend": None,  # vllm-ascend's
    "block_size": 128,
    "max_num_seqs": 8,
    "max_model_len": 512,
    "max_num_batched_tokens": 512,
    "gpu_memory_utilization": 0.5,
    "enable_prefix_caching": False,  # prompts are repeated, and a hit is another computation
    "additional_config": {"enable_mlapo": False},  # one of the operators that are not here
}
PIPELINE: dict[str, Any] = {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}
FOUR = {"NPU_STANDIN_DEVICES": "4"}


def start(ranks: int, model: Path = TINY, environment: dict[str, str] | None = None, **options: Any) -> Iterator[Ranks]:
    """Start engines with these settings, and end them."""
    # Data parallel engines in processes of the test take steps together only if each step waits for its results.
    shared = (
        {"enable_expert_parallel": True, "async_scheduling": False} if ranks > 1 else {"enable_expert_parallel": False}
    )
    engines = Ranks(model, ranks, environment or {}, **{**OPTIONS, **shared, **options})
    try:
        yield engines
    finally:
        engines.close()
