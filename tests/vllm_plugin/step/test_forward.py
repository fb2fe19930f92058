"""The forward that replaces a model's own: when it leaves a step unsplit, and its checks. No engine needed."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from vllm.config import CUDAGraphMode
from vllm.forward_context import (
    ForwardContext,
    get_forward_context,
    is_forward_context_available,
    override_forward_context,
)
from vllm.sequence import IntermediateTensors

from dbo_runtime.batch import Batch
from dbo_runtime.decline import Decline
from dbo_runtime.engine.runtime import MicroBatchRuntime
from dbo_runtime.engine.transport import HIDES_NOTHING
from dbo_runtime.errors import ConfigError, ScheduleError, SplitError
from dbo_runtime.ir.program import ProgramBuilder
from dbo_runtime.observe.timeline import Timeline
from dbo_runtime.planner.costs.op_cost import CommCost, ComputeCost, OpCost
from dbo_runtime.planner.online.correction import MAX_LOG_CHANGE, PERIOD_STEPS
from dbo_runtime.planner.online.planner import Planner
from dbo_runtime.planner.online.split_choice import SplitChoice
from dbo_runtime.vllm_plugin.api.groups import Groups
from dbo_runtime.vllm_plugin.extension import WorkerExtension
from dbo_runtime.vllm_plugin.install.served_model import ServedModel
from dbo_runtime.vllm_plugin.parallel import agreement
from dbo_runtime.vllm_plugin.parallel.agreement import Agreement
from dbo_runtime.vllm_plugin.platforms.registry import get_platform
from dbo_runtime.vllm_plugin.step import forward as forward_module
from dbo_runtime.vllm_plugin.step.decision import StepDecider
from dbo_runtime.vllm_plugin.step.forward import SplitForward
from dbo_runtime.vllm_plugin.step.warm_up import Phase
from dbo_runtime.vllm_plugin.telemetry.metrics import Metrics
from tests.support.planner.machines import make_table
from tests.support.vllm.forwards import (
    BATCH,
    EXPECTED,
    IDS,
    ONE_RANK,
    POSITIONS,
    Lines,
    Model,
    Splitter,
    make_context,
    make_forward,
    run,
)
from tests.support.vllm.metrics import scrape
from tests.support.vllm.split_forwards import assemble

HANDED = IntermediateTensors({"hidden_states": torch.zeros(8, 2)})  # to a model that is no stage


def test_a_step_runs_in_micro_batches_each_in_its_own_context() -> None:
    model, splitter = Model(), Splitter()
    forward = make_forward(model, splitter)
    assert torch.equal(run(forward), EXPECTED)
    assert forward.runtime.statistics.as_dict() == {
        "split": 1,
        "nano": 0,
        "concurrent": 0,
        "micro_batches": 2,
        "declined": {},
    }
    assert [id(context) for context in model.seen] == [id(context) for context in splitter.contexts]
    assert model.unsplit == []


def test_the_steps_own_context_is_current_again_afterwards() -> None:
    context = make_context()
    with override_forward_context(context):
        make_forward(Model())(IDS, POSITIONS)
        assert get_forward_context() is context


def test_the_steps_own_context_is_current_again_after_an_error() -> None:
    model, context = Model(), make_context()
    model.error = MemoryError("no memory")
    with override_forward_context(context):
        with pytest.raises(MemoryError, match="no memory"):
            make_forward(model)(IDS, POSITIONS)
        assert get_forward_context() is context


def test_embeddings_that_are_given_are_taken() -> None:
    embeds = torch.arange(16.0).reshape(8, 2)
    expected = Model().forward(None, POSITIONS, embeds=embeds)
    assert torch.equal(run(make_forward(Model()), input_ids=None, inputs_embeds=embeds), expected)


def test_the_check_gives_the_unsplit_step_the_embeddings_as_they_came() -> None:
    """Ops may overwrite their inputs; the runner's own buffer must not be what they overwrite."""
    embeds = torch.arange(16.0).reshape(8, 2)
    expected = Model().forward(None, POSITIONS, embeds=embeds)
    model = Model()
    model.in_place = True
    assert torch.equal(run(make_forward(model, check=True), input_ids=None, inputs_embeds=embeds.clone()), expected)


def test_positions_of_three_dimensions_are_split_by_token() -> None:
    positions = torch.arange(24).reshape(3, 8)
    assert torch.equal(run(make_forward(Model()), positions=positions), Model().forward(IDS, positions))


def test_cuts_can_be_chosen_from_outside() -> None:
    model = Model()
    forward = make_forward(model)
    forward.decider.choose_cuts = lambda batch: [2, 6]
    assert torch.equal(run(forward), EXPECTED)
    assert forward.runtime.statistics.micro_batches == 3


@pytest.mark.parametrize(
    ("splitter", "kwargs", "reason"),
    [
        (Splitter(Decline("padded batch", "8 of 9")), {}, "padded batch"),
        (Splitter(contexts=Decline("a reason")), {}, "a reason"),
        (Splitter(Batch((1,), 0)), {}, "nowhere to cut"),
        (Splitter(), {"intermediate_tensors": HANDED}, "unknown intermediate tensors"),
        (Splitter(), {"spec_step_idx": 1}, "unknown arguments of forward()"),
    ],
    ids=["batch", "contexts", "cuts", "pipeline", "arguments"],
)
def test_a_declined_step_runs_unsplit_with_the_arguments_as_they_are(
    splitter: Splitter, kwargs: dict[str, Any], reason: str
) -> None:
    model = Model()
    forward = make_forward(model, splitter)
    assert torch.equal(run(forward, **kwargs), EXPECTED)
    intermediate = kwargs.pop("intermediate_tensors", None)
    assert model.unsplit == [(IDS, POSITIONS, intermediate, None, kwargs)]
    assert model.seen == []
    assert forward.runtime.statistics.as_dict() == {
        "split": 0,
        "nano": 0,
        "concurrent": 0,
        "micro_batches": 0,
        "declined": {reason: 1},
    }


def test_without_a_forward_context_a_step_runs_unsplit() -> None:
    forward = make_forward(Model())
    assert not is_forward_context_available()
    assert torch.equal(forward(IDS, POSITIONS), EXPECTED)
    assert forward.runtime.statistics.declined == {"no forward context": 1}


class _CPUSHMDistributed:
    """Goes by the name of what vLLM's CPU build reduces with on one host."""


def make_group(dist_module: Any = dist, world_size: int = 2) -> SimpleNamespace:
    communicator = SimpleNamespace(dist_module=dist_module)
    return SimpleNamespace(world_size=world_size, device_communicator=communicator, cpu_group="cpu")


SHARED = make_group(_CPUSHMDistributed())


@pytest.mark.parametrize(
    ("groups", "hosts", "transport"),
    [
        (Groups(ONE_RANK, None, ONE_RANK), 1, "none"),
        (Groups(SHARED, None, SHARED), 1, "shared memory"),
        (Groups(make_group(), None, make_group()), 2, "network"),
        (Groups(SimpleNamespace(device_communicator=None), None, make_group()), 1, "one host"),
        (Groups(ONE_RANK, make_group(), make_group()), 1, "one host"),
        (Groups(ONE_RANK, make_group(), make_group()), 2, "network"),
        (Groups(SHARED, make_group(), make_group(world_size=4)), 1, "one host"),
        (Groups(SHARED, make_group(), make_group(world_size=4)), 2, "network"),
    ],
)
def test_the_transport_is_found(groups: Groups, hosts: int, transport: str) -> None:
    assert get_platform("cpu").get_transport(groups, hosts) == transport


def test_nothing_is_split_before_vllm_has_warmed_up() -> None:
    forward = make_forward(Model())
    forward.phase = Phase.STARTING
    assert torch.equal(run(forward), EXPECTED)
    assert forward.runtime.statistics.declined == {"starting up": 1}


@pytest.mark.parametrize("transport", HIDES_NOTHING)
def test_auto_declines_where_there_is_nothing_to_hide(transport: str) -> None:
    forward = make_forward(Model(), mode="auto", transport=transport)
    assert torch.equal(run(forward), EXPECTED)
    assert forward.runtime.statistics.declined == {"no communication to hide": 1}


@pytest.mark.parametrize("transport", HIDES_NOTHING)
def test_with_costs_auto_may_split_where_other_processes_of_the_host_carry_tokens(transport: str) -> None:
    """What a reduce over shared memory takes, it computes; and one rank has none."""
    forward = make_forward(Model(), mode="auto", transport=transport)
    learn(forward)
    assert torch.equal(run(forward), EXPECTED)
    statistics = forward.runtime.statistics
    assert (statistics.split, dict(statistics.declined)) == (
        (1, {}) if transport == "one host" else (0, {"no communication to hide": 1})
    )


def make_concurrent_forward(model: Model, splitter: Any, host_sync: bool = False, **settings: Any) -> SplitForward:
    """Return a forward whose program has an op on the side lane."""
    forward = make_forward(model, splitter)
    p = ProgramBuilder(has_side=True)
    x, positions = p.input("x"), p.input("positions", token_dim=-1)
    p.side("aside", lambda positions: positions + 1, positions)
    program = p.build(p.compute("compute", model.compute, x, positions, host_sync=host_sync))
    config = replace(forward.runtime.config, **settings)
    runtime = MicroBatchRuntime(program, forward.runtime.device, config, Lines())
    agreement = Agreement(ONE_RANK)
    return assemble(model, StepDecider(runtime, splitter, agreement, "none"), agreement)


def run_served(forward: SplitForward, context: ForwardContext, **kwargs: Any) -> torch.Tensor:
    with override_forward_context(context):
        hidden: torch.Tensor = forward(**{"input_ids": IDS, "positions": POSITIONS, **kwargs})
    return hidden


def make_served_context(**changes: Any) -> ForwardContext:
    return replace(make_context(), attn_metadata={"layer": object()}, **changes)


@pytest.mark.parametrize(
    ("splitter", "mode", "reason"),
    [
        (Splitter(), "auto", "no communication to hide"),
        (Splitter(Decline("padded batch", "8 of 9")), "always", "padded batch"),
        (Splitter(Batch((1,), 0)), "always", "nowhere to cut"),
    ],
)
def test_a_step_that_is_not_split_may_have_concurrent_ops_and_counts_both(
    splitter: Splitter, mode: str, reason: str
) -> None:
    model = Model()
    forward = make_concurrent_forward(model, splitter, side="on", mode=mode)
    assert torch.equal(run_served(forward, make_served_context()), EXPECTED)
    assert model.unsplit == []
    assert forward.runtime.statistics.as_dict() == {
        "split": 0,
        "nano": 0,
        "concurrent": 1,
        "micro_batches": 0,
        "declined": {reason: 1},
    }


@pytest.mark.parametrize(
    ("context", "kwargs", "settings"),
    [
        (make_context(), {}, {}),
        (make_served_context(cudagraph_runtime_mode=CUDAGraphMode.FULL), {}, {}),
        (replace(make_context(), attn_metadata=[{}]), {}, {}),
        (make_served_context(), {"spec_step_idx": 1}, {}),
        (make_served_context(), {}, {"side": "off"}),
        (make_served_context(), {}, {"side": "auto"}),
        (make_served_context(), {}, {"mode": "off"}),
    ],
    ids=["profiling", "graph", "split already", "arguments", "off", "no costs", "all off"],
)
def test_some_steps_run_as_vllm_would_run_them(
    context: ForwardContext, kwargs: dict[str, Any], settings: dict[str, Any]
) -> None:
    model = Model()
    splitter = Splitter(Decline("nothing to cut"))
    forward = make_concurrent_forward(model, splitter, **{"side": "on", "mode": "always", **settings})
    assert torch.equal(run_served(forward, context, **kwargs), EXPECTED)
    assert len(model.unsplit) == 1
    assert forward.runtime.statistics.concurrent == 0


@pytest.mark.parametrize("mode", [CUDAGraphMode.NONE, CUDAGraphMode.FULL])
def test_before_vllm_serves_its_graphs_of_unsplit_steps_get_concurrent_ops(mode: CUDAGraphMode) -> None:
    model = Model()
    forward = make_concurrent_forward(model, Splitter(), side="on")
    forward.phase = Phase.STARTING
    assert torch.equal(run_served(forward, make_served_context(cudagraph_runtime_mode=mode)), EXPECTED)
    assert (forward.runtime.statistics.concurrent, model.unsplit) == (1, [])
    run_served(forward, make_context())  # profiling, without attention
    assert forward.runtime.statistics.declined == {"starting up": 1}
    forward.runtime.config = replace(forward.runtime.config, side="off")
    run_served(forward, make_served_context(cudagraph_runtime_mode=mode))
    assert forward.runtime.statistics.declined == {"starting up": 2}


@pytest.mark.parametrize(
    ("settings", "communication"),
    [({"check": True}, "ALLGATHER"), ({"host_sync": True}, "ALLGATHER"), ({}, "MC2")],
    ids=["checked", "an op waits for the device", "fused communication"],
)
def test_graphs_stay_those_of_vllm_where_they_cannot_hold_ours(settings: dict[str, Any], communication: str) -> None:
    """A capture in which results are read, or in which the host waits, fails and takes vLLM's start with it."""
    model = Model()
    forward = make_concurrent_forward(model, Splitter(), side="on", **settings)
    forward.phase = Phase.STARTING
    context = make_served_context(cudagraph_runtime_mode=CUDAGraphMode.FULL)
    context.moe_comm_type = SimpleNamespace(name=communication)  # type: ignore[attr-defined]  # vllm-ascend's
    assert torch.equal(run_served(forward, context), EXPECTED)
    assert (forward.runtime.statistics.concurrent, len(model.unsplit)) == (0, 1)


def test_what_goes_into_a_graph_is_not_recorded() -> None:
    """It takes no time yet: a timeline that was requested is of the first step that is served."""
    forward = make_concurrent_forward(Model(), Splitter(), side="on", mode="auto")
    forward.observer.recording.request()
    forward.phase = Phase.STARTING
    run_served(forward, make_served_context(cudagraph_runtime_mode=CUDAGraphMode.FULL))
    assert forward.observer.recording.timeline is None
    forward.phase = Phase.SERVING
    run_served(forward, make_served_context())
    assert forward.observer.recording.timeline is not None


def test_costs_may_make_ops_concurrent_where_there_is_no_communication() -> None:
    """Several lanes that compute gain something on a single device, too."""
    model = Model()
    forward = make_concurrent_forward(model, Splitter(), side="auto", mode="auto")
    ops: dict[str, OpCost] = {"aside": ComputeCost(1e-3), "compute": ComputeCost(1e-3)}
    table = make_table(forward.runtime.program, ops)
    forward.runtime.planner = Planner(forward.runtime.program, table)
    run_served(forward, make_served_context())
    assert forward.runtime.statistics.declined == {"no communication to hide": 1}
    forward.runtime.planner = Planner(forward.runtime.program, replace(table, contention={"side": 1.1}))
    assert torch.equal(run_served(forward, make_served_context()), EXPECTED)
    assert forward.runtime.statistics.concurrent == 1


def test_auto_splits_where_ranks_talk_over_a_network() -> None:
    forward = make_forward(Model(), mode="auto")
    assert torch.equal(run(forward), EXPECTED)
    assert forward.runtime.statistics.split == 1


class OtherRank:
    """Stands for the second of two ranks: decides as we do, unless *decision* is set."""

    def __init__(self) -> None:
        self.decision: str | None = None
        self.compared: list[Any] = []
        self.numbers = 0

    def exchange(self, group: Any, own: bytes) -> list[bytes]:
        assert group.cpu_group == "cpu"
        self.compared.append(json.loads(own))
        return [own, own if self.decision is None else json.dumps(self.decision).encode()]

    def gather_number(self, said: list[torch.Tensor], own: torch.Tensor, group: Any) -> None:
        assert group == "cpu"
        self.numbers += 1
        said[0].copy_(own)
        said[1].copy_(own if self.decision is None else own + 1)


@pytest.fixture
def other_rank(monkeypatch: pytest.MonkeyPatch) -> OtherRank:
    rank = OtherRank()
    monkeypatch.setattr(agreement, "exchange_bytes", rank.exchange)
    monkeypatch.setattr(dist, "all_gather", rank.gather_number)
    return rank


def test_ranks_compare_what_they_are_about_to_do_when_checked(other_rank: OtherRank) -> None:
    forward = make_forward(Model(), group=make_group(), check=True)
    run(forward)
    forward.decider.splitter.batch = Decline("padded batch", "8 of 9")
    run(forward)
    assert re.fullmatch(r"schedule [0-9a-f]{16}, cuts \[4\]", other_rank.compared[0])
    problem, difference = other_rank.compared[1:3]  # none of either
    assert (problem, difference, other_rank.compared[3:]) == ("", "", ["padded batch (8 of 9)"])


@pytest.mark.parametrize("splitter", [Splitter(), Splitter(Decline("a reason"))], ids=["splits", "declines"])
def test_ranks_that_decide_differently_stop_before_anything_runs(other_rank: OtherRank, splitter: Splitter) -> None:
    other_rank.decision = "schedule 0123456789abcdef, cuts [6]"
    model = Model()
    with pytest.raises(
        ScheduleError, match=r"differently .*please report.*rank 1: schedule 0123456789abcdef, cuts \[6\]"
    ):
        run(make_forward(model, splitter, make_group(), check=True))
    assert model.seen == model.unsplit == []


def test_ranks_compare_a_plan_once_and_nothing_more_unless_asked_to(other_rank: OtherRank) -> None:
    forward = make_forward(Model(), group=make_group())
    for _ in range(3):
        run(forward)
    assert (other_rank.numbers, other_rank.compared) == (1, [])
    forward.decider.choose_cuts = lambda batch: [2, 6]
    forward.decider.splitter.contexts = None
    run(forward)
    assert other_rank.numbers == 2


def test_a_new_plan_that_differs_stops_without_being_asked(other_rank: OtherRank) -> None:
    other_rank.decision = "another"
    model = Model()
    with pytest.raises(ScheduleError, match=r"differently .*rank 0: schedule .*rank 1: another"):
        run(make_forward(model, group=make_group()))
    assert model.seen == model.unsplit == []


@pytest.mark.parametrize("slip", [0.1, float("nan"), float("inf")])
def test_the_check_finds_any_difference_that_is_not_rounding(slip: float) -> None:
    model = Model()
    model.slip = slip
    with pytest.raises(SplitError, match=r"with cuts at \[4\], schedule"):
        run(make_forward(model, check=True))


@pytest.mark.parametrize("slip", [0.0, 1e-3])
def test_the_check_allows_rounding_relative_to_the_largest_value(slip: float) -> None:
    """Values are about 100 here, and fp32 is allowed 1e-4 of that."""
    model = Model()
    model.slip = slip
    assert torch.equal(run(make_forward(model, check=True)), EXPECTED)


def learn(forward: SplitForward) -> Planner:
    """Let a forward plan by costs, and learn; return its planner."""
    program = forward.runtime.program
    ops: dict[str, OpCost] = {"compute": ComputeCost(per_token=1e-6), "reduce": CommCost(0.0, 1e-6, 1.0)}
    planner = forward.runtime.planner = Planner(program, make_table(program, ops))
    return planner


def test_the_last_step_has_its_mode_and_its_expected_and_measured_seconds() -> None:
    forward = make_forward(Model())
    run(forward)
    assert forward.observer.last_step is not None
    assert forward.observer.last_step[:2] == ("split", None)
    planner = learn(forward)
    run(forward)
    choice = planner.choose(BATCH, forward.runtime.config)
    assert isinstance(choice, SplitChoice)
    assert forward.observer.last_step[:2] == ("split", choice.prediction.split)
    forward.runtime.config = replace(forward.runtime.config, mode="off")
    run(forward)
    assert forward.observer.last_step[:2] == ("unsplit", None)
    assert forward.observer.last_step.seconds > 0


def test_every_step_is_counted_whatever_becomes_of_it_and_those_predicted_are_noted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks measure different things, but gather at the same step."""
    forward = make_forward(Model())
    planner, noted = learn(forward), []
    monkeypatch.setattr(planner.memory, "observe", lambda *step: noted.append(step))
    run(forward)  # split
    choice = planner.choose(BATCH, forward.runtime.config)
    forward.decider.choose_cuts = lambda batch: [2, 6]
    forward.decider.splitter.contexts = None
    run(forward)  # split without a prediction
    forward.decider.choose_cuts = None
    forward.runtime.config = replace(forward.runtime.config, mode="auto", margin=0.9)
    run(forward)  # declined by prediction
    run(forward, spec_step_idx=1)  # declined for another reason
    assert planner.memory.correction._steps == 4
    assert isinstance(choice, SplitChoice)
    assert [mode for mode, *_ in noted] == ["split", "unsplit"]
    predicted = [choice.prediction.split, choice.prediction.unsplit]
    assert [expected for _, expected, *_ in noted] == pytest.approx(predicted, rel=1e-6)
    assert all(seconds > 0 for _, _, seconds, _ in noted)


def test_steps_before_vllm_has_warmed_up_are_not_counted() -> None:
    forward = make_forward(Model())
    planner = learn(forward)
    forward.phase = Phase.STARTING
    run(forward)
    assert planner.memory.correction._steps == 0


def test_a_step_that_is_checked_is_counted_once_and_without_the_check() -> None:
    forward = make_forward(Model(), check=True)
    planner = learn(forward)
    unsplit = forward._forward

    def check(*arguments: Any, **kwargs: Any) -> Any:
        assert planner.memory.correction._steps == 1, "the step is over"
        return unsplit(*arguments, **kwargs)

    forward._forward = check
    assert torch.equal(run(forward), EXPECTED)
    assert planner.memory.correction._steps == 1
    assert planner.memory.correction.propose().keys() == {"split"}


def test_now_and_then_ranks_gather_what_they_learnt_and_correct_predictions_and_nothing_else(
    other_rank: OtherRank,
) -> None:
    forward = make_forward(Model(), group=make_group())
    planner = learn(forward)
    run(forward)
    config, before = forward.runtime.config, planner.choose(BATCH, forward.runtime.config)
    for _ in range(PERIOD_STEPS - 2):
        run(forward)
    assert (other_rank.compared, planner.memory.correction.factor("split")) == ([], 1.0)
    run(forward)
    ((errors, measured),) = other_rank.compared
    assert errors.keys() == {"split"}
    assert measured[1] == {}  # nothing is on probation where all steps are split
    assert planner.memory.correction.factor("split") == pytest.approx(
        math.exp(MAX_LOG_CHANGE)
    )  # far slower than predicted
    assert planner.memory.correction.factor("unsplit") == 1.0
    after = planner.choose(BATCH, config)
    assert isinstance(before, SplitChoice)
    assert isinstance(after, SplitChoice)
    assert after.prediction.split == pytest.approx(before.prediction.split * math.exp(MAX_LOG_CHANGE))
    assert (after.slices, after.order) == (before.slices, before.order)
    assert after.prediction.unsplit == pytest.approx(before.prediction.unsplit, rel=1e-6)
    assert forward.runtime.config == config
    assert forward.runtime.statistics.as_dict() == {
        "split": PERIOD_STEPS,
        "nano": 0,
        "concurrent": 0,
        "micro_batches": 2 * PERIOD_STEPS,
        "declined": {},
    }


def make_extension(forward: SplitForward | None) -> WorkerExtension:
    extension = WorkerExtension()
    model = SimpleNamespace(forward=lambda: None)
    if forward is not None:
        rank = SimpleNamespace(platform=get_platform("cpu"), config=forward.runtime.config)
        ServedModel(rank, forward).install(model)
    extension.model_runner = SimpleNamespace(get_model=lambda: model)
    return extension


def test_a_second_compute_lane_that_was_not_opened_at_start_is_refused_later() -> None:
    forward = make_forward(Model())
    extension = make_extension(forward)
    before = forward.runtime.config
    with pytest.raises(ConfigError, match=r"^DBO_SIDE=on: the second compute lane was not opened at start"):
        extension.dbo_configure({"DBO_SIDE": "on", "DBO_MODE": "off"})
    assert forward.runtime.config == before
    extension.dbo_configure({"DBO_SIDE": "auto", "DBO_MODE": "off"})  # on a CPU, `auto` opens none
    assert forward.runtime.config.mode == "off"


def test_a_second_compute_lane_can_be_left_and_used_again() -> None:
    forward = make_concurrent_forward(Model(), Splitter(), side="on")
    extension = make_extension(forward)
    for side in ("off", "on"):
        extension.dbo_configure({"DBO_SIDE": side})
        assert forward.runtime.config.side == side


def test_a_timeline_is_kept_of_the_one_step_it_was_asked_for() -> None:
    forward = make_forward(Model())
    extension = make_extension(forward)
    run(forward)
    assert extension.dbo_timeline() is None
    extension.dbo_request_timeline()
    run(forward)
    first = extension.dbo_timeline()
    run(forward)
    assert extension.dbo_timeline() == first
    assert first is not None
    spans = Timeline.from_dict(first).spans
    assert sorted(span[:3] for span in spans) == [
        ("comm", "reduce", 0),
        ("comm", "reduce", 1),
        ("compute", "compute", 0),
        ("compute", "compute", 1),
    ]
    lengths = {span[1:3]: span.end - span.start for span in spans}
    paths = [lengths["compute", part] + lengths["reduce", part] for part in range(2)]
    assert max(paths) <= first["bound"] <= sum(lengths.values())


class Clock:
    """Stands still, but for what is added to it."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


class SlowSplitter(Splitter):
    """Takes a quarter of a second to read a batch."""

    def __init__(self, clock: Clock, batch: Batch | Decline = BATCH) -> None:
        super().__init__(batch)
        self._clock = clock

    def read_batch(self, context: Any, tokens: int) -> Batch | Decline:
        self._clock.now += 0.25
        return super().read_batch(context, tokens)


class SlowModel(Model):
    """Takes 4 s for each forward."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def embed_input_ids(self, ids: torch.Tensor) -> torch.Tensor:
        self._clock.now += 4.0
        return super().embed_input_ids(ids)


@pytest.mark.parametrize("batch", [BATCH, Decline("padded batch")])
def test_the_time_that_a_served_step_waits_for_its_decision_is_counted_without_the_model_s(
    batch: Batch | Decline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(forward_module, "time", clock)
    forward = make_forward(SlowModel(clock), SlowSplitter(clock, batch), metrics=Metrics(tmp_path, "tiny", 0))
    forward.observer.recording.request()
    forward.phase = Phase.STARTING
    run(forward)
    forward.start_serving()
    for _ in range(2):
        run(forward)
    found = scrape(tmp_path)
    buckets = {float(labels[-1]): value for labels, value in found["vllm:dbo_planning_seconds_bucket"].items()}
    assert (buckets[0.1], buckets[1.0]) == (0, 2)
    assert list(found["vllm:dbo_planning_seconds_sum"].values()) == [0.5]
    timeline = forward.observer.recording.timeline
    assert (None if timeline is None else timeline.planning) == (0.25 if isinstance(batch, Batch) else None)


def test_a_worker_whose_model_is_not_split_has_nothing_to_tell() -> None:
    extension = make_extension(None)
    extension.dbo_request_timeline()
    extension.dbo_cut_at([5])
    extension.dbo_cut_images_at([1])
    extension.dbo_configure({"DBO_MODE": "off"})
    assert extension.dbo_statistics() is None
    assert extension.dbo_encoder_statistics() is None
    assert extension.dbo_timeline() is None
    assert extension.dbo_last_step() is None
    assert extension.dbo_calibrate() is None
    assert extension.dbo_predict([8, 8]) is None


def test_a_worker_that_has_run_no_step_and_has_no_costs_tells_so() -> None:
    extension = make_extension(make_forward(Model()))
    assert extension.dbo_last_step() is None
    assert extension.dbo_calibrate() is None
    assert extension.dbo_predict([8, 8]) is None


def test_cuts_that_cannot_be_made_are_left_out() -> None:
    forward = make_forward(Model())
    extension = make_extension(forward)
    extension.dbo_cut_at([1, 4, 6, 7, 8, 99])  # 1 and 7 leave a piece of one token, 8 and 99 are no offsets inside
    assert forward.decider.choose_cuts is not None
    assert forward.decider.choose_cuts(BATCH) == [4, 6]
    extension.dbo_cut_at(None)
    assert forward.decider.choose_cuts is None


@pytest.mark.parametrize(
    ("cuts", "tokens", "sizes"),
    [
        ([[4], [2]], [8, 6], ((4, 2), (4, 4))),
        ([[2, 4], [1, 5]], [8, 6], ((2, 1), (2, 4), (4, 1))),
        ([[2, 4], [1, 5]], [8, 5], ((2, 1), (6, 4))),  # the second rank can make only one of its cuts, so both do
        ([[4], [2]], [8, 2], Decline("nowhere to cut", "a rank has fewer tokens than its first cut")),
    ],
)
def test_data_parallel_ranks_are_given_the_cuts_of_all(cuts: list[list[int]], tokens: list[int], sizes: Any) -> None:
    forward = make_forward(Model())
    extension = make_extension(forward)
    forward.decider.rank = 0
    with pytest.raises(SplitError, match="a list of cuts each"):
        extension.dbo_cut_at([4])
    extension.dbo_cut_at(cuts)
    assert forward.decider.choose_cuts is None
    assert forward.decider.choose_sizes is not None
    assert forward.decider.choose_sizes(tokens) == sizes
    extension.dbo_cut_at(None)
    assert forward.decider.choose_sizes is None
