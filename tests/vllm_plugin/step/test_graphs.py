"""vLLM captures this package's program of a decode where costs say that it gains, and its own forward elsewhere."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import ForwardContext, override_forward_context

from dbo_runtime.config import RuntimeConfig
from dbo_runtime.decline import Decline
from dbo_runtime.devices.virtual import VirtualDevice
from dbo_runtime.engine.runtime import MicroBatchRuntime
from dbo_runtime.ir.program import ProgramBuilder
from dbo_runtime.planner.costs.op_cost import CommCost, ComputeCost, OpCost
from dbo_runtime.planner.online.graph_planner import choose_graphs
from dbo_runtime.planner.online.shapes import ServingLimits
from dbo_runtime.vllm_plugin.context.batch_size import BatchSize
from dbo_runtime.vllm_plugin.parallel.agreement import Agreement
from dbo_runtime.vllm_plugin.step.decision import StepDecider
from dbo_runtime.vllm_plugin.step.first_steps import FirstSteps
from dbo_runtime.vllm_plugin.step.forward import SplitForward
from dbo_runtime.vllm_plugin.step.tensor_rows import TENSOR_ROWS
from dbo_runtime.vllm_plugin.step.warm_up import Phase
from tests.support.planner.machines import make_table
from tests.support.vllm.forwards import EXPECTED, IDS, ONE_RANK, POSITIONS, Lines, Model, Splitter, make_context
from tests.support.vllm.split_forwards import assemble

DECODES = BatchSize(tokens=8, requests=8, max_query_len=1)
PREFILL = BatchSize(tokens=8, requests=1, max_query_len=8)


FULL, NONE, PIECEWISE = CUDAGraphMode.FULL, CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE


def make_forward(model: Model, dispatch: float = 1e-3, host_sync: bool = False, **settings: Any) -> SplitForward:
    """Return a forward that starts up. By its costs, a dispatch of so many seconds can run during 1 ms of computing."""
    p = ProgramBuilder()
    x, positions = p.input("x"), p.input("positions", token_dim=-1)
    p.comm("dispatch", lambda positions: positions + 1, positions, host_sync=host_sync)
    program = p.build(p.compute("compute", model.compute, x, positions, token_wise=True))
    config, log, group = RuntimeConfig(**{"mode": "auto", **settings}), Lines(), ONE_RANK
    splitter: Any = Splitter()
    splitter.size = DECODES
    runtime = MicroBatchRuntime(program, VirtualDevice(lambda step: 1.0), config, log, rows=TENSOR_ROWS)
    agreement = Agreement(group)
    forward = assemble(model, StepDecider(runtime, splitter, agreement, "network"), agreement)
    ops: dict[str, OpCost] = {"dispatch": CommCost(dispatch, 0.0, 1.0), "compute": ComputeCost(1e-3)}
    table = make_table(program, ops)
    forward.decider.warm_up.graphs = choose_graphs(program, table, [8], ServingLimits(), config)
    forward.phase = Phase.STARTING
    return forward


def make_dummy(mode: CUDAGraphMode, **changes: Any) -> ForwardContext:
    """Return the context of a step that vLLM captures (`FULL`), or that it runs right before (`NONE`)."""
    return replace(make_context(), attn_metadata={"layer": object()}, cudagraph_runtime_mode=mode, **changes)


def run(forward: SplitForward, context: ForwardContext) -> torch.Tensor:
    with override_forward_context(context):
        hidden: torch.Tensor = forward(IDS, POSITIONS)
    return hidden


def count(forward: SplitForward) -> tuple[int, int]:
    """Return how many steps ran with concurrent ops, and how many by the model's own forward."""
    statistics = forward.runtime.statistics
    return statistics.concurrent, sum(statistics.declined.values())


@pytest.mark.parametrize("mode", [NONE, FULL])
def test_a_decode_is_captured_with_concurrent_ops_where_that_gains(mode: CUDAGraphMode) -> None:
    model = Model()
    forward = make_forward(model)
    assert torch.equal(run(forward, make_dummy(mode)), EXPECTED)
    assert (count(forward), model.unsplit) == ((1, 0), [])


def test_the_log_says_once_which_graphs_hold_them() -> None:
    forward = make_forward(Model())
    for mode in (NONE, FULL):
        run(forward, make_dummy(mode))
    log: Any = forward.runtime.log
    assert log.events.count("a graph of decodes holds concurrent ops") == 1


@pytest.mark.parametrize(
    ("context", "options"),
    [
        (make_dummy(FULL), {"dispatch": 1e-6}),
        (make_dummy(FULL), {"host_sync": True}),
        (make_dummy(FULL), {"check": True}),
        (replace(make_dummy(PIECEWISE), attn_metadata={}), {}),
        (replace(make_dummy(NONE), attn_metadata={}), {}),
    ],
    ids=["no gain", "waits", "checked", "piecewise: a piece has no attention", "profiling"],
)
def test_other_graphs_hold_the_models_own_forward(context: ForwardContext, options: dict[str, Any]) -> None:
    model = Model()
    forward = make_forward(model, **options)
    assert torch.equal(run(forward, context), EXPECTED)
    assert count(forward) == (0, 1)
    assert forward.runtime.statistics.declined == {"starting up": 1}


@pytest.mark.parametrize("size", [PREFILL, None])
def test_what_is_no_decode_is_not_planned_like_one(size: BatchSize | None) -> None:
    forward = make_forward(Model())
    forward.decider.splitter.size = size  # type: ignore[attr-defined]
    run(forward, make_dummy(NONE))
    assert count(forward) == (0, 1)


@pytest.mark.parametrize("tokens", [[8, 7], [7, 8]])
def test_data_parallel_ranks_of_different_sizes_capture_their_own_forward(tokens: list[int]) -> None:
    forward = make_forward(Model())
    of_ranks: Any = SimpleNamespace(num_tokens_across_dp_cpu=torch.tensor(tokens))
    run(forward, make_dummy(FULL, dp_metadata=of_ranks))
    assert count(forward) == (0, 1)


def test_without_costs_graphs_hold_the_models_own_forward() -> None:
    forward = make_forward(Model())
    forward.decider.warm_up.graphs = {}
    run(forward, make_dummy(FULL))
    assert count(forward) == (0, 1)


@pytest.mark.parametrize("mode", [NONE, FULL])
def test_where_first_steps_are_compared_graphs_hold_the_models_own_forward(mode: CUDAGraphMode) -> None:
    """A replay gives no results to compare."""
    forward = make_forward(Model())
    forward.decider.first_steps = FirstSteps(Lines())  # type: ignore[arg-type]
    run(forward, make_dummy(mode))
    assert count(forward) == (0, 1)


def test_after_a_failed_rehearsal_graphs_hold_the_models_own_forward() -> None:
    forward = make_forward(Model())
    forward.decider.refusal = Decline("an op fails")
    run(forward, make_dummy(FULL))
    assert forward.runtime.statistics.declined == {"starting up": 1}
