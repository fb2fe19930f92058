"""Engines, started once for all tests that need them. They are real: vLLM's CPU build and a trained model.

The plugin's tests and the laboratory's use them, and a session has each only once: so they are fixtures of all tests,
and vLLM is imported when one is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.vllm.engine import Engine
    from tests.support.vllm.engines import Engines
    from tests.support.vllm.ranks import Ranks


@pytest.fixture(scope="session")
def engines() -> Iterator[Engines]:
    """Return what starts engines; a test that needs it has the marker `vllm`."""
    from tests.support.vllm.engines import Engines

    engines = Engines()
    yield engines
    engines.close()


@pytest.fixture(scope="session")
def one_rank(engines: Engines) -> Engine:
    """Return an engine with its worker in this process."""
    return engines.get(1, "nobind")


@pytest.fixture(scope="session")
def two_ranks(engines: Engines) -> Engine:
    """Return an engine with two tensor parallel workers, each on a core of its own."""
    from tests.support.vllm.engines import share_cores

    return engines.get(2, share_cores())


@pytest.fixture(scope="session")
def expert_ranks(engines: Engines) -> Engine:
    """Return an engine with two tensor parallel workers that share out the experts."""
    from tests.support.vllm.engines import share_cores

    return engines.get(2, share_cores(), enable_expert_parallel=True)


@pytest.fixture(scope="module", params=["all_gather", pytest.param("all_to_all", marks=pytest.mark.slow)])
def data_parallel(request: pytest.FixtureRequest, engines: Engines) -> Iterator[Ranks]:
    """Return two data parallel ranks that share out the experts, with either way to reach them."""
    with engines.start_ranks(2, settings={"DBO_DISPATCH": request.param}, max_num_batched_tokens=2048) as ranks:
        yield ranks


def mark_engines(items: list[pytest.Item]) -> None:
    """Mark what starts an engine."""
    for item in items:
        if "engines" in getattr(item, "fixturenames", ()):
            item.add_marker("vllm")
