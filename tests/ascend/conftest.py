"""What all tests inside vllm-ascend share: its engines, each in processes of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.standin.cann import cann
from tests.standin.cann.build import build
from tests.support import suites
from tests.support.ascend.engines import ENVIRONMENT, FOUR, PIPELINE, start
from tests.support.vllm.ranks import Ranks

OBSTACLE = suites.ASCEND.explain_left_out()
collect_ignore_glob = [] if OBSTACLE is None else ["test_*.py"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option of `make verdicts`."""
    parser.addoption("--all-forms", action="store_true", help="test_verdicts.py: serve all forms, not a sample")


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
