"""Costs that are measured on streams, where the host issues kernels ahead of the device, or is late."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from dbo_runtime.planner.costs.batch_features import BatchFeatures
from dbo_runtime.planner.costs.cost_file import load_costs
from dbo_runtime.planner.costs.cost_table import CostTable
from tests.standin.cann.cann import load
from tests.support.ascend.engines import start
from tests.support.ascend.jobs import answer, make_prompts
from tests.support.vllm.engine import Engine

SECONDS = 8.0
# The device is slower than its host with these kernels, and faster in all others.
SLOW = {"HcclAllReduce": 0.03, "FusedInferAttentionScore": 0.03}
SLOWEST_HOST = 0.02  # seconds that it takes for an op, on shared cores


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[CostTable, dict[str, Any]]]:
    """Return the costs that two tensor parallel ranks measure, and their report."""
    path = tmp_path_factory.mktemp("costs") / "costs.json"
    for npus in start(1, tensor_parallel_size=2):
        (report,) = npus.run(calibrate, str(path))
        yield load_costs(path), report


def calibrate(engine: Engine, rank: int, path: str) -> dict[str, Any]:
    """Calibrate between requests, whose answers stay what they were."""
    prompts = [make_prompts(40, 23)]
    before, _ = answer(engine, rank, prompts)
    engine.llm.collective_rpc(slow_down, args=(SLOW,))
    reports = engine.llm.collective_rpc("dbo_calibrate", args=(path, SECONDS))
    engine.llm.collective_rpc(slow_down, args=({},))
    after, _ = answer(engine, rank, prompts)
    assert before == after
    assert len({report["digest"] for report in reports}) == 1
    report: dict[str, Any] = reports[0]
    return report


def slow_down(worker: Any, delays: Mapping[str, float]) -> None:
    """Let kernels of a worker's device take these seconds longer, and no others."""
    standin = load()
    assert standin is not None
    standin.calm()
    for kernel, seconds in delays.items():
        standin.delay(kernel, seconds)


def test_what_kernels_take_is_found_again(calibrated: tuple[CostTable, dict[str, Any]]) -> None:
    table, _ = calibrated
    for op in ("attn_reduce", "mlp_reduce"):
        assert table.ops[op].time(BatchFeatures(64)) == pytest.approx(SLOW["HcclAllReduce"], rel=0.3)


def test_what_the_host_takes_for_an_op_is_measured(calibrated: tuple[CostTable, dict[str, Any]]) -> None:
    host = calibrated[0].host
    assert not host.computes
    assert 0 < host.issue < SLOWEST_HOST
    assert 0 < host.unsplit_issue < SLOWEST_HOST


def test_the_report_says_how_far_sizes_were_measured(calibrated: tuple[CostTable, dict[str, Any]]) -> None:
    _, report = calibrated
    assert report["largest"] >= 8
    assert report["largest"] == 512 or report["left_out"] > 0


def test_costs_are_kept_in_a_file(calibrated: tuple[CostTable, dict[str, Any]]) -> None:
    table, report = calibrated
    assert table.digest == report["digest"]
    assert table.provenance.machine["platform"] == "npu"
