"""Costs that choose what vLLM captures are loaded before it captures, and only then."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import CUDAGraphMode

from dbo_runtime.batch import Batch
from dbo_runtime.config import RuntimeConfig
from dbo_runtime.devices.virtual import VirtualDevice
from dbo_runtime.engine.runtime import MicroBatchRuntime
from dbo_runtime.errors import ConfigError
from dbo_runtime.ir.program import ProgramBuilder
from dbo_runtime.planner.costs.op_cost import CommCost, ComputeCost, OpCost
from dbo_runtime.planner.online.planner import Planner
from dbo_runtime.vllm_plugin.install import cost_source
from dbo_runtime.vllm_plugin.install.cost_source import CostSource
from dbo_runtime.vllm_plugin.parallel.agreement import Agreement
from dbo_runtime.vllm_plugin.step.decision import StepDecider
from dbo_runtime.vllm_plugin.step.forward import SplitForward
from dbo_runtime.vllm_plugin.step.tensor_rows import TENSOR_ROWS
from tests.support.planner.machines import make_table
from tests.support.vllm.forwards import ONE_RANK, Lines, Model, Splitter
from tests.support.vllm.split_forwards import assemble

OTHER = ["", "issue orders cannot be prepared: no memory"]
FILE = RuntimeConfig(mode="auto", costs="costs.json")


def make_forward() -> SplitForward:
    """Return a forward whose dispatch can run while another op computes."""
    p = ProgramBuilder()
    x, positions = p.input("x"), p.input("positions", token_dim=-1)
    p.comm("dispatch", lambda positions: positions + 1, positions)
    program = p.build(p.compute("compute", Model().compute, x, positions, token_wise=True))
    config, splitter, group = RuntimeConfig(mode="auto"), Splitter(), ONE_RANK
    runtime = MicroBatchRuntime(program, VirtualDevice(lambda step: 1.0), config, Lines(), rows=TENSOR_ROWS)
    agreement = Agreement(group)
    return assemble(Model(), StepDecider(runtime, splitter, agreement, "network"), agreement)


def load_costs(source: Any, dispatch: float) -> None:
    """Let the source load costs by which a dispatch takes so many seconds, and what computes 1 ms."""
    runtime = source.forward.runtime
    ops: dict[str, OpCost] = {"dispatch": CommCost(dispatch, 0.0, 1.0), "compute": ComputeCost(1e-3)}
    planner = Planner(runtime.program, make_table(runtime.program, ops), rows=TENSOR_ROWS)

    def load(path: str) -> None:
        runtime.planner = planner

    source.load = load


def make_source(monkeypatch: pytest.MonkeyPatch, mode: CUDAGraphMode = CUDAGraphMode.FULL_DECODE_ONLY) -> Any:
    """Return a source that does not read files, but tells what it was asked to load."""
    compilation = SimpleNamespace(cudagraph_mode=mode, cudagraph_capture_sizes=[1, 2])
    scheduler = SimpleNamespace(max_num_batched_tokens=64, max_num_seqs=4)
    vllm_config = SimpleNamespace(
        compilation_config=compilation, scheduler_config=scheduler, model_config=SimpleNamespace(max_model_len=128)
    )
    rank: Any = SimpleNamespace(
        groups=SimpleNamespace(all_ranks=SimpleNamespace(world_size=1)),
        log=Lines(),
        stage=SimpleNamespace(name=""),
        vllm_config=vllm_config,
    )
    rank.log.warning = rank.log.info
    source: Any = CostSource(None, make_forward(), None, rank)  # type: ignore[arg-type]
    source.loaded = []
    monkeypatch.setattr(source, "load", source.loaded.append)
    return source


def test_a_file_is_loaded_before_graphs_are_captured_and_not_again(monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_source(monkeypatch)
    source.prepare_graphs(FILE)
    assert (source.loaded, source.is_early) == (["costs.json"], True)


def test_programs_are_chosen_and_their_executors_made_before_graphs_are_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = make_source(monkeypatch)
    load_costs(source, dispatch=1e-3)
    source.prepare_graphs(FILE)
    graphs = source.forward.decider.warm_up.graphs
    assert {size: choice.order.name for size, choice in graphs.items()} == {1: "nano-1", 2: "nano-1"}
    made = source.forward.runtime.describe_caches()["executors"][0]
    for size, choice in graphs.items():
        source.forward.runtime.plan(Batch((size,), 0), (), choice)
    assert source.forward.runtime.describe_caches()["executors"][0] == made > 0


def test_if_one_rank_cannot_choose_all_capture_the_models_own_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_source(monkeypatch)
    load_costs(source, dispatch=1e-3)
    monkeypatch.setattr(cost_source, "gather", lambda group, own: [own, OTHER] if isinstance(own, list) else [own])
    source.prepare_graphs(FILE)
    assert source.forward.decider.warm_up.graphs == {}
    assert source.rank.log.events[-1] == "vLLM's graphs hold the model's own forward"


@pytest.mark.parametrize(
    ("config", "mode"),
    [
        (FILE, CUDAGraphMode.NONE),
        (FILE, CUDAGraphMode.PIECEWISE),
        (RuntimeConfig(mode="auto"), CUDAGraphMode.FULL),
        (RuntimeConfig(mode="always", costs="costs.json"), CUDAGraphMode.FULL),
        (RuntimeConfig(mode="auto", costs="costs.json", calibrate=True), CUDAGraphMode.FULL),
    ],
    ids=["eager", "piecewise", "no costs", "always", "to be measured"],
)
def test_elsewhere_nothing_is_loaded_early(
    monkeypatch: pytest.MonkeyPatch, config: RuntimeConfig, mode: CUDAGraphMode
) -> None:
    source = make_source(monkeypatch, mode)
    source.prepare_graphs(config)
    assert source.loaded == []
    assert source.forward.decider.warm_up.graphs == {}


def test_costs_that_cannot_be_used_are_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_source(monkeypatch)

    def fail(path: str) -> None:
        source.loaded.append(path)
        raise ConfigError("of another model")

    monkeypatch.setattr(source, "load", fail)
    source.prepare_graphs(FILE)
    assert (source.loaded, source.is_early) == (["costs.json"], True)
    assert source.rank.log.events == ["no costs to plan with; DBO_MODE=auto goes by the thresholds"]
    assert source.forward.decider.warm_up.graphs == {}
