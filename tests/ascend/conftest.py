"""What all tests inside vllm-ascend share: its engines, each in processes of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dbo_runtime.vllm_plugin.api.known import LATEST_ASCEND
from dbo_runtime.vllm_plugin.platforms.npu import find_release
from tests.standin_cann import cann
from tests.standin_cann.build import build
from tests.support import suites
from tests.support.vllm.ranks import Ranks

TINY = Path(__file__).parents[2] / "examples" / "tiny-deepseek"
ENVIRONMENT = {
    "STANDIN_ASCEND": "1",
    "NPU_STANDIN_DEVICES": "2",
    "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:False",  # the stand-in has no virtual memory
    "CI": "",  # else torch refuses operators of vllm-ascend that it only warns of elsewhere
    "TORCHINDUCTOR_AUTOGRAD_CACHE": "0",  # vllm-ascend's compiler is made for an older torch than the stand-in needs
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # tests send functions to workers
    "VLLM_ASCEND_ENABLE_DBO": "1",
    "DBO_MODE": "off",
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


OBSTACLE = suites.ASCEND.explain_left_out()
collect_ignore_glob = [] if OBSTACLE is None else ["test_*.py"]


@pytest.fixture(scope="session", autouse=True)
def _environment() -> Iterator[None]:
    """Set what every process has to find when it starts, its libraries above all; a failing build fails all tests."""
    libraries = build()
    cann.load()  # for this process, where transformers imports torch_npu if that is there
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**ENVIRONMENT, "LD_LIBRARY_PATH": str(libraries)}.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(autouse=True)
def _device(record_property: Callable[[str, object], None]) -> None:
    """Count these tests with those on the NPU."""
    record_property("device", "npu")


@pytest.fixture(scope="module")
def one_npu() -> Iterator[Ranks]:
    """Return an engine on one device."""
    yield from start(1)


@pytest.fixture(scope="module")
def two_npus() -> Iterator[Ranks]:
    """Return an engine with two tensor parallel workers that share out the experts."""
    yield from start(1, tensor_parallel_size=2, enable_expert_parallel=True)


@pytest.fixture(scope="module")
def expert_npus() -> Iterator[Ranks]:
    """Return two data parallel engines that share out the experts."""
    yield from start(2)


@pytest.fixture(scope="module")
def two_stages() -> Iterator[Ranks]:
    """Return an engine whose model is a pipeline of two stages, on one device each."""
    yield from start(1, **PIPELINE)


@pytest.fixture(scope="module")
def stages_of_two() -> Iterator[Ranks]:
    """Return the same with two tensor parallel workers on each stage, which share out its experts."""
    yield from start(1, environment=FOUR, tensor_parallel_size=2, enable_expert_parallel=True, **PIPELINE)


@pytest.fixture(scope="module")
def expert_stages() -> Iterator[Ranks]:
    """Return two data parallel pipelines; those on a stage share out its experts."""
    yield from start(2, environment=FOUR, **PIPELINE)


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
