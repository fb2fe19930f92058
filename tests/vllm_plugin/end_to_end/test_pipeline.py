"""Pipeline parallel, end to end: the real vLLM, stages in processes of their own, split and unsplit."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import dbo_runtime
from dbo_runtime.lab.trace.trace_file import read_trace
from dbo_runtime.observe.timeline import Timeline
from dbo_runtime.planner.costs.cost_file import load_costs
from tests.support.vllm.costs import calibrate_few, forget_costs, get_costs
from tests.support.vllm.engine import Engine, make_prompt
from tests.support.vllm.engines import Engines, share_cores
from tests.support.vllm.equivalence import (
    BOUNDARIES,
    MIXED,
    PROMPTS,
    assert_close,
    get_unsplit,
    run_cut,
    run_in_nano_batches,
    run_unsplit,
)

STAGES = 2
LAYERS = ({0, 1}, {2})  # of the tiny model, as vLLM shares them out

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="session")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces")


@pytest.fixture(scope="session")
def stages(traces: Path, engines: Engines) -> Engine:
    """Return an engine whose model is on two stages, each with one rank on a core of its own."""
    settings = {"DBO_TRACE": str(traces), "DBO_TRACE_STEPS": "3"}
    return engines.get(1, share_cores(), settings=settings, pipeline_parallel_size=STAGES)


@pytest.mark.parametrize("cuts", [(BOUNDARIES[0],), (BOUNDARIES[2],), (17,), (263,), (100, 300), (132, 264, 396)])
def test_prefill_is_close_at_boundaries_and_inside_requests(stages: Engine, cuts: tuple[int, ...]) -> None:
    assert_close(get_unsplit(stages, PROMPTS), run_cut(stages, cuts, PROMPTS))


@pytest.mark.parametrize("cuts", [(1,), (2, 4), (40,), (2, 162)])
def test_decode_and_mixed_steps_are_close(stages: Engine, cuts: tuple[int, ...]) -> None:
    assert_close(get_unsplit(stages, PROMPTS, 6, MIXED), run_cut(stages, cuts, PROMPTS, 6, MIXED))


@pytest.mark.parametrize("tokens", [1, 6], ids=["prefill", "mixed"])
def test_nano_batches_are_close(stages: Engine, tokens: int) -> None:
    arrive = MIXED if tokens > 1 else ()
    answers = run_in_nano_batches(stages, PROMPTS, tokens, arrive, DBO_MICRO_BATCHES="3")
    assert_close(get_unsplit(stages, PROMPTS, tokens, arrive), answers)


def test_a_long_prompt_is_cut_by_the_settings(stages: Engine) -> None:
    prompt = [make_prompt(701, 3)]
    unsplit = run_unsplit(stages, prompt)
    stages.configure(DBO_MICRO_BATCHES="3")
    before = [rank["micro_batches"] for rank in stages.statistics()]
    try:
        assert_close(unsplit, stages.generate(prompt))
    finally:
        stages.configure()
    assert [rank["micro_batches"] for rank in stages.statistics()] == [count + 3 for count in before]


def test_each_stage_runs_its_own_layers_split_and_one_rank_counts_the_step(stages: Engine) -> None:
    before, served = stages.statistics(), dbo_runtime.statistics()["split"]
    stages.llm.collective_rpc("dbo_request_timeline")
    run_cut(stages, (BOUNDARIES[0],), PROMPTS)
    for found, layers in zip(stages.llm.collective_rpc("dbo_timeline"), LAYERS, strict=True):
        spans = Timeline.from_dict(found).spans
        assert {span.micro_batch for span in spans} == {0, 1}
        assert {int(span.op[1]) for span in spans if "." in span.op} == layers
        assert ("final_norm" in {span.op for span in spans}) == (2 in layers)
    grown = [now["split"] - then["split"] for then, now in zip(before, stages.statistics(), strict=True)]
    assert grown == [grown[0]] * STAGES
    assert dbo_runtime.statistics()["split"] - served == grown[0] > 0


def test_the_check_of_every_step_passes_on_all_stages(stages: Engine) -> None:
    stages.configure(DBO_CHECK="1")
    before = stages.count_split()
    try:
        stages.generate(PROMPTS, 4, MIXED)
    finally:
        stages.configure()
    assert stages.count_split() > before


def configure_stage(worker: Any, stage: int, mode: str) -> None:
    if worker.rank == stage:
        worker.dbo_configure({"DBO_MODE": mode})


@pytest.mark.parametrize("alone", range(STAGES))
def test_a_stage_may_split_what_the_other_leaves_unsplit(stages: Engine, alone: int) -> None:
    """What they pass on is undivided either way, so they need not agree."""
    unsplit = run_unsplit(stages, PROMPTS, 4, MIXED)
    before = stages.statistics()
    stages.llm.collective_rpc(configure_stage, args=(1 - alone, "off"))
    try:
        assert_close(unsplit, stages.generate(PROMPTS, 4, MIXED))
    finally:
        stages.configure()
    grown = [now["split"] - then["split"] for then, now in zip(before, stages.statistics(), strict=True)]
    assert grown[alone] > 0
    assert grown[1 - alone] == 0


def test_auto_declines_where_a_stage_is_one_rank(stages: Engine) -> None:
    before = stages.statistics()
    stages.configure(DBO_MODE="auto")
    try:
        stages.generate(PROMPTS)
    finally:
        stages.configure()
    for then, now in zip(before, stages.statistics(), strict=True):
        assert now["split"] == then["split"]
        assert now["declined"]["no communication to hide"] > then["declined"].get("no communication to hide", 0)


def test_each_stage_writes_traces_of_its_own(stages: Engine, traces: Path) -> None:
    stages.generate(PROMPTS, 4)
    names = {f"step-{step:06}.pp{stage}.json" for step in (1, 2, 3) for stage in range(STAGES)}
    assert set(os.listdir(traces)) == names
    for stage, layers in enumerate(LAYERS):
        (timeline,) = read_trace(traces / f"step-000001.pp{stage}.json").values()
        assert {int(span.op[1]) for span in timeline.spans if "." in span.op} == layers


def load_on_stage(worker: Any, path: str) -> str:
    forward = worker.model_runner.get_model().forward
    get_costs(forward).load(path)
    digest: str = forward.runtime.planner.table.digest
    return digest


def test_each_stage_has_costs_of_its_own_and_answers_as_before(stages: Engine, tmp_path: Path) -> None:
    unsplit = run_unsplit(stages, PROMPTS, 4, MIXED)
    path = tmp_path / "costs.json"
    try:
        reports = stages.llm.collective_rpc(calibrate_few, args=(str(path),))
        tables = [load_costs(tmp_path / f"costs.pp{stage}.json") for stage in range(STAGES)]
        digests = [table.digest for table in tables]
        assert [digest for _, digest in reports] == digests
        assert [table.provenance.parallel["stage"] for table in tables] == list(range(STAGES))
        assert ["final_norm" in table.ops for table in tables] == [False, True]
        assert stages.llm.collective_rpc(load_on_stage, args=(str(path),)) == digests
        assert_close(unsplit, stages.generate(PROMPTS, 4, MIXED))
        stages.generate(PROMPTS)
        assert all(step["expected"] is not None for step in stages.llm.collective_rpc("dbo_last_step"))
    finally:
        stages.llm.collective_rpc(forget_costs)
    assert not path.exists()
