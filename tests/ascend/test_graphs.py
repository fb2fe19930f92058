"""Graphs of decodes inside vllm-ascend whose ops overlap because costs say so: dispatch and shared experts.

The stand-in computes each row by itself, so equal means equal to the last bit; see test_equivalence.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from dbo_runtime.ir.op import COMM
from dbo_runtime.planner.costs.cost_file import save_costs
from dbo_runtime.planner.costs.cost_table import CostTable, Provenance
from dbo_runtime.planner.costs.op_cost import CommCost, ComputeCost, HostCost, OpCost
from dbo_runtime.planner.costs.program_spec import describe_program
from tests.support.ascend.engines import start
from tests.support.ascend.jobs import make_prompts
from tests.support.ascend.options import GRAPHS
from tests.support.ascend.replays import IN_GRAPH, trace_replays
from tests.support.vllm.engine import Answer, Engine, find_difference

PROMPTS = [make_prompts(40, 30, 25, 5), make_prompts(40, 7)]
TOKENS = 17
GATHER, SHARED_EXPERTS = "HcclAllGather", {"Matmul", "SwiGlu"}
SIZES = GRAPHS["compilation_config"]["cudagraph_capture_sizes"]
HELD = "a graph of decodes holds concurrent ops"


def write_costs(engine: Engine, rank: int, path: str) -> None:
    """Write costs by which every op takes as long."""
    served = engine.runner.get_model()._dbo_served_model
    program, identity = served.forward.runtime.program, served.costs.identity
    provenance = Provenance(
        "measured", "made up", "2026-11-29", identity.machine, identity.model, identity.parallel, identity.versions
    )
    ops: dict[str, OpCost] = {
        op.name: CommCost(1e-3, 0.0, 1.0) if op.lane == COMM else ComputeCost(1e-3) for op in program.ops
    }
    alone = dict.fromkeys(("compute", "comm"), 1.0)
    table = CostTable(provenance, describe_program(program), ops, alone, HostCost(), dict.fromkeys(ops, 0.0))
    if rank == 0:
        save_costs(table, path)


def answer(engine: Engine, rank: int) -> list[Answer]:
    return engine.generate(PROMPTS[rank], TOKENS)


def list_overlapping(engine: Engine, rank: int) -> set[str]:
    """Return the kernels of replays that start to compute while tokens are dispatched, which takes long here."""
    replayed = trace_replays(engine, PROMPTS[rank][:2], **{GATHER: 0.02})
    gathers = [kernel for kernel in replayed if kernel.name == GATHER]
    computing = [kernel for kernel in replayed if kernel.stream % IN_GRAPH == 0]
    assert gathers
    assert computing
    return {each.name for each in computing for gather in gathers if gather.start < each.start < gather.end}


def test_decodes_replayed_from_graphs_that_costs_chose_give_the_same_bits(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "costs.json")
    for eager in start(2):
        expected = eager.run(answer)
        eager.run(write_costs, path)
    for costs, overlapping in ({}, set()), ({"DBO_COSTS": path}, SHARED_EXPERTS):
        capfd.readouterr()
        for replaying in start(2, environment={"DBO_MODE": "auto", **costs}, **GRAPHS):
            log = capfd.readouterr().err
            assert log.count(HELD) == (len(SIZES) if costs else 0)
            for unsplit, found in zip(expected, replaying.run(answer), strict=True):
                assert find_difference(unsplit, found) == 0.0
            for names in replaying.run(list_overlapping):
                assert (names & SHARED_EXPERTS) == overlapping
