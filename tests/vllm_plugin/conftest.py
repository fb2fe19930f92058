"""Engines, started once for all tests that need them. They are real: vLLM's CPU build and a trained model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from tests.vllm_plugin.engine import Engine
from tests.vllm_plugin.rank_hosts import RankHosts
from tests.vllm_plugin.ranks import Ranks

TINY = Path(__file__).parents[2] / "examples" / "tiny-deepseek"
ENVIRONMENT = {
    "VLLM_ASCEND_ENABLE_DBO": "1",
    "DBO_MODE": "always",
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # engine and, with one rank, worker in this very process
    "VLLM_LOGGING_LEVEL": "ERROR",
}


@pytest.fixture(scope="session")
def one_rank() -> Iterator[Engine]:
    """Return an engine with its worker in this process."""
    yield from start(1, "nobind")


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Engine]:
    """Return an engine with two tensor parallel workers, each on a core of its own."""
    yield from start(2, share_cores())


@pytest.fixture(scope="session")  # not shorter: ending one engine takes down the groups of others in this process
def expert_ranks() -> Iterator[Engine]:
    """Return an engine with two tensor parallel workers that share out the experts."""
    yield from start(2, share_cores(), enable_expert_parallel=True)


@pytest.fixture(scope="session")
def hosts() -> Iterator[RankHosts]:
    """Return the processes that ranks are forked by."""
    hosts = RankHosts({"OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR"})
    yield hosts
    hosts.close()


@pytest.fixture(scope="module", params=["all_gather", "all_to_all"])
def data_parallel(request: pytest.FixtureRequest, hosts: RankHosts) -> Iterator[Ranks]:
    """Return two data parallel ranks that share out the experts, with either way to reach them."""
    cores = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "DBO_DISPATCH": request.param}
    ranks = Ranks(TINY, 2, {**ENVIRONMENT, **cores}, hosts, max_num_batched_tokens=2048)
    try:
        yield ranks
    finally:
        ranks.close()


def start(
    ranks: int, cores: str, model: Path = TINY, settings: Mapping[str, str] = MappingProxyType({}), **options: Any
) -> Iterator[Engine]:
    """Start an engine in our environment, and shut it down.

    *settings* are there while it starts, and in workers of their own: other engines read this process's environment.
    """
    with pytest.MonkeyPatch.context() as patch:
        for variable, value in {**ENVIRONMENT, "VLLM_CPU_OMP_THREADS_BIND": cores}.items():
            patch.setenv(variable, value)
        with pytest.MonkeyPatch.context() as own:
            for variable, value in settings.items():
                own.setenv(variable, value)
            engine = Engine(model, ranks, **options)
        try:
            yield engine
        finally:
            engine.close()


def share_cores() -> str:
    """Return one core for each of two ranks, as the demo does."""
    from examples.offline_dualbatch_overlap_npu import share_cores

    return share_cores(2)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what starts an engine."""
    for item in items:
        if {"one_rank", "two_ranks", "expert_ranks", "data_parallel"} & set(getattr(item, "fixturenames", ())):
            item.add_marker("vllm")
