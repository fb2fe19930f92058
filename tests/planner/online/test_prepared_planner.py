"""The planner that serves, against the one that searches and simulates for each step."""

from __future__ import annotations

import random
from dataclasses import replace
from statistics import mean
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dbo_runtime.batch import Batch
from dbo_runtime.bounded import BoundedDict
from dbo_runtime.config import RuntimeConfig
from dbo_runtime.decline import Decline
from dbo_runtime.ir.op import SIDE
from dbo_runtime.ir.validate import validate
from dbo_runtime.lab.oracle.searching_planner import SearchingPlanner
from dbo_runtime.lab.whatif.published_cases import get_case
from dbo_runtime.planner.costs.batch_features import BatchFeatures
from dbo_runtime.planner.costs.cost_table import CommCost, ComputeCost, HostCost
from dbo_runtime.planner.costs.program_spec import build_program
from dbo_runtime.planner.online import ab_trial, named_order, predictor, simulation
from dbo_runtime.planner.online.ab_trial import Proposal
from dbo_runtime.planner.online.candidates import Candidates
from dbo_runtime.planner.online.correction import SPLIT, UNSPLIT
from dbo_runtime.planner.online.cuts import measure_slices
from dbo_runtime.planner.online.named_order import compute_end
from dbo_runtime.planner.online.planner import ALIKE, Planner
from dbo_runtime.planner.online.predictor import Predictor
from dbo_runtime.planner.online.shapes import ServingLimits
from dbo_runtime.planner.online.split_choice import SplitChoice
from dbo_runtime.planner.online.step_memory import MAX_CLASSES
from tests.support.planner.machines import BYTES, PROGRAM, make_table, measure_unsplit
from tests.support.planner.prepared_machines import (
    FEW_STATES,
    LIMITS,
    MACHINES,
    PreparedMachine,
    draw_batch,
    make_alike,
)
from tests.support.planner.served_orders import draw_prompts
from tests.support.profiles import scale
from tests.support.strategies import batches

AUTO = RuntimeConfig(split="micro", probation=False)
ALWAYS = RuntimeConfig(mode="always", split="micro")
PROMPT = Batch((4096,), 4096)
NEAR_MARGIN = 0.01  # share of a step by which a predicted gain may be on the other side of the margin


def simulate(machine: PreparedMachine, batch: Batch, choice: SplitChoice) -> float:
    """Return what a step takes with what its micro-batches really are."""
    timeline = Predictor(*machine).simulate(choice.order.schedule, measure_slices(batch, choice.slices))
    return compute_end(timeline) + machine.table.host.split


def split(planner: Planner, batch: Batch, config: RuntimeConfig = AUTO) -> SplitChoice:
    choice = planner.choose(batch, config)
    assert isinstance(choice, SplitChoice), choice
    return choice


def decline(planner: Planner, batch: Batch, config: RuntimeConfig = AUTO) -> Decline:
    choice = planner.choose(batch, config)
    assert isinstance(choice, Decline), choice
    return choice


def count_evaluations(monkeypatch: pytest.MonkeyPatch, planner: Planner) -> list[BatchFeatures]:
    """Return a list that grows by the features of each step that is evaluated from now on."""
    evaluated: list[BatchFeatures] = []
    evaluate = planner._evaluate

    def spy(features: BatchFeatures, *rest: Any) -> SplitChoice | Decline:
        evaluated.append(features)
        return evaluate(features, *rest)

    monkeypatch.setattr(planner, "_evaluate", spy)
    return evaluated


# Against the planner that searches and simulates


@pytest.mark.slow
@pytest.mark.parametrize("name", MACHINES)
def test_steps_are_decided_as_by_a_search_and_a_simulation(name: str) -> None:
    """Where decisions differ, the gain is near the margin, or near nothing in the worst case."""
    machine, rng = MACHINES[name], random.Random(name)
    prepared, reference = machine.open_planner(), SearchingPlanner(*machine, FEW_STATES)
    differing = 0
    steps = [draw_batch(rng) for _ in range(12 if SIDE in machine.program.lanes else 25)]
    for batch in steps:
        ours, theirs = prepared.choose(batch, AUTO), reference.choose(batch, AUTO)
        if isinstance(ours, SplitChoice) and isinstance(theirs, SplitChoice):
            assert ours.prediction.split <= theirs.prediction.split * 1.03
        if type(ours) is not type(theirs):
            differing += 1
            prediction = next(each.prediction for each in (ours, theirs) if isinstance(each, SplitChoice))
            distance = min(prediction.gain - AUTO.margin, prediction.worst_case)
            assert distance <= 2 * NEAR_MARGIN, (batch, ours, theirs)
    assert differing <= 2


@pytest.mark.slow
@pytest.mark.parametrize("name", MACHINES)
def test_a_step_is_predicted_to_take_what_a_simulation_says(name: str) -> None:
    machine, rng = MACHINES[name], random.Random(name)
    planner = machine.open_planner()
    predicted, simulated = [], []
    for _ in range(25):
        batch = draw_batch(rng)
        choice = planner.choose(batch, ALWAYS)
        if isinstance(choice, SplitChoice):
            validate(choice.order.schedule)
            predicted.append(choice.prediction.split)
            simulated.append(simulate(machine, batch, choice))
            assert choice.prediction.unsplit == pytest.approx(planner.predict_unsplit(measure_unsplit(batch)))
    assert len(predicted) > 20
    assert predicted == pytest.approx(simulated, rel=0.03)
    errors = sorted(abs(ours / theirs - 1) for ours, theirs in zip(predicted, simulated, strict=True))
    assert errors[len(errors) // 2] < 5e-3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["alike", "unlike", "unlike, contended", "side"])
@pytest.mark.parametrize("parts", [2, 3])
def test_a_step_that_cannot_be_cut_evenly_is_predicted_as_closely(name: str, parts: int) -> None:
    """What is critical then is another path than for even cuts."""
    machine, rng = MACHINES[name], random.Random(name)
    planner = machine.open_planner()
    for _ in range(10):
        lengths = [rng.choice((8, 50, 400, 3000)) for _ in range(parts)]
        batch = Batch(tuple(lengths), sum(lengths), cuttable=False)
        choice = planner.choose(batch, replace(ALWAYS, micro_batches=parts))
        if isinstance(choice, SplitChoice):
            assert choice.prediction.split == pytest.approx(simulate(machine, batch, choice), rel=0.05), lengths


@pytest.mark.slow
def test_nothing_is_searched_for_lowered_or_simulated_once_it_is_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    planners = [MACHINES[name].open_planner() for name in ("unlike, contended", "side")]
    for planner in planners:
        planner.prepare(AUTO)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("this takes too long inside a step")

    monkeypatch.setattr(Candidates, "find", refuse)
    monkeypatch.setattr(Candidates, "make_policy", refuse)
    monkeypatch.setattr(named_order, "lower", refuse)
    for module in (predictor, simulation):
        monkeypatch.setattr(module, "predict_timeline", refuse)
    rng = random.Random(0)
    for planner in planners:
        for config in (AUTO, replace(AUTO, mode="always"), replace(AUTO, margin=0.1)):
            for _ in range(20):
                choice = planner.choose(draw_batch(rng), config)
                planner.choose_data_parallel([rng.randint(1, 4096) for _ in range(3)], config)
                assert isinstance(choice, Decline) or choice.order.schedule.instructions
        planner.memory.apply([({SPLIT: 0.01}, Proposal(False, {}))])
        planner.choose(PROMPT, AUTO)


# What is remembered


def test_a_step_of_a_kind_is_cut_and_predicted_like_the_first_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = MACHINES["alike"]
    planner = machine.open_planner()
    evaluated = count_evaluations(monkeypatch, planner)
    first = split(planner, PROMPT)
    other = Batch((4010,), 4010, context_lens=(3,))
    second = split(planner, other)
    assert len(evaluated) == 1
    assert second.order is first.order
    assert second.slices[0].size / 4010 == pytest.approx(first.slices[0].size / 4096, abs=1e-3)
    assert second.prediction.unsplit == pytest.approx(planner.predict_unsplit(measure_unsplit(other)))
    assert second.prediction.split == pytest.approx(simulate(machine, other, second), rel=5e-3)
    fresh = split(machine.open_planner(), other)
    assert second.prediction.split == pytest.approx(fresh.prediction.split, rel=2 * ALIKE)


def test_a_decline_of_a_kind_says_what_this_step_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    planner = MACHINES["alike"].open_planner()
    evaluated = count_evaluations(monkeypatch, planner)
    for tokens in (64, 63):
        batch = Batch((tokens,), tokens)
        unsplit = planner.predict_unsplit(measure_unsplit(batch))
        assert decline(planner, batch).expected == pytest.approx(unsplit)
    assert len(evaluated) == 1


def test_a_doubted_split_of_a_kind_says_what_this_step_takes_unsplit(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is what measured steps are compared with."""
    gain = split(MACHINES["alike"].open_planner(), PROMPT).prediction.gain
    planner, config = MACHINES["alike"].open_planner(), replace(AUTO, margin=gain + 0.01)
    evaluated = count_evaluations(monkeypatch, planner)
    for tokens in (4096, 4000):
        batch = Batch((tokens,), tokens)
        unsplit = planner.predict_unsplit(measure_unsplit(batch))
        assert decline(planner, batch, config).expected == pytest.approx(unsplit)
    assert len(evaluated) == 1


def test_a_step_for_which_the_decision_of_its_kind_is_worse_is_decided_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    planner = MACHINES["unlike"].open_planner()  # where attention takes no other share of an uneven step
    evaluated = count_evaluations(monkeypatch, planner)
    even, uneven = Batch((2048, 2048), 4096, cuttable=False), Batch((3800, 296), 4096, cuttable=False)
    kinds = {planner._classify(measure_unsplit(batch), batch.cuttable) for batch in (even, uneven)}
    assert len(kinds) == 1
    good = split(planner, even)
    bad = planner.choose(uneven, AUTO)
    assert len(evaluated) == 2
    assert isinstance(bad, Decline) or bad.prediction.split > good.prediction.split * (1 + ALIKE)
    split(planner, even)  # what is remembered now does not suit this one less well
    assert len(evaluated) == 2


def test_a_step_that_cannot_be_cut_well_does_not_keep_others_from_being_split() -> None:
    planner = MACHINES["alike"].open_planner()
    uneven, even = Batch((4090, 6), 4096, cuttable=False), Batch((2048, 2048), 4096, cuttable=False)
    decline(planner, uneven)
    assert split(planner, even).slices[0].size == 2048


def test_a_step_that_cannot_be_cut_at_all_does_not_keep_others_from_being_split() -> None:
    planner = MACHINES["alike"].open_planner()
    assert decline(planner, Batch((4096,), 4096, cuttable=False), ALWAYS).reason == "nowhere to cut"
    assert split(planner, Batch((2048, 2048), 4096, cuttable=False), ALWAYS).slices[0].size == 2048
    assert decline(planner, Batch((4096,), 4096, cuttable=False), ALWAYS).reason == "nowhere to cut"


def test_what_is_learnt_changes_decisions(monkeypatch: pytest.MonkeyPatch) -> None:
    planner = MACHINES["alike"].open_planner()
    predicted = split(planner, PROMPT).prediction
    evaluated = count_evaluations(monkeypatch, planner)
    split(planner, PROMPT)
    assert not evaluated
    planner.memory.observe(SPLIT, 1.0, 1.5)
    for _ in range(40):
        planner.memory.apply([(planner.memory.correction.propose(), Proposal(False, {}))])
    declined = decline(planner, PROMPT)
    assert len(evaluated) == 1
    assert f"{predicted.split * 1.5 * 1e3:.2f} ms in" in declined.detail
    planner.memory.observe(UNSPLIT, 1.0, 1.5)
    for _ in range(40):
        planner.memory.apply([(planner.memory.correction.propose(), Proposal(False, {}))])
    again = split(planner, PROMPT).prediction
    assert (again.split, again.unsplit) == pytest.approx((predicted.split * 1.5, predicted.unsplit * 1.5))
    assert split(planner, PROMPT).prediction.split == pytest.approx(again.split)


def test_caches_do_not_grow_beyond_their_bounds() -> None:
    planner = MACHINES["alike, doubted"].open_planner()
    planner.prepare(RuntimeConfig())
    memory = planner.memory
    memory._decided, memory._split, memory.too_small = BoundedDict(16), BoundedDict(16), BoundedDict(16)
    ask_distinct(planner, 1000)
    assert {len(memory._decided), len(memory._split), len(memory.too_small)} == {16}
    before = count_entries(planner)
    ask_distinct(planner, 500, first=1000)
    assert count_entries(planner) <= before + ab_trial.MAX_CLASSES


@pytest.mark.slow
def test_years_of_serving_leave_bounded_caches() -> None:
    planner = MACHINES["side"].open_planner()
    ask_distinct(planner, 20_000)
    caches = planner.memory.sizes_and_capacities
    assert caches["decisions"][1] == MAX_CLASSES
    assert {name for name, (entries, most) in caches.items() if entries > most} == set()
    assert caches["decisions"][0] < caches["decisions"][1], "steps are of few classes"


def ask_distinct(planner: Planner, count: int, first: int = 0) -> None:
    """Let it plan so many steps, all of which differ from each other."""
    rng, config = random.Random(first), RuntimeConfig()
    for number in range(first, first + count):
        lengths = tuple(rng.randint(2, 4000) for _ in range(rng.randint(1, 3)))
        contexts = (number, *[rng.randint(0, 99)] * (len(lengths) - 1))
        planner.choose(Batch(lengths, sum(lengths), context_lens=contexts), config)
        planner.decline_early(sum(lengths))


def count_entries(planner: Planner) -> int:
    """Return the entries of all dictionaries and lists that a planner has, at any depth."""
    seen: dict[int, object] = {}
    todo: list[object] = [planner]
    entries = 0
    while todo:
        one = todo.pop()
        if id(one) in seen or isinstance(one, (str, int, float, type)) or callable(one):
            continue
        seen[id(one)] = one
        children = list(vars(one).values()) if hasattr(one, "__dict__") else []
        if isinstance(one, dict):
            children += [*one.keys(), *one.values()]
            entries += len(one)
        elif isinstance(one, (list, tuple, set)):
            children += one
            entries += len(one)
        todo += children
    return entries


# Ranks


@settings(max_examples=scale(50))
@given(st.lists(batches() | st.floats(0.9, 1.2), max_size=5), st.sampled_from(["alike, doubted", "side"]))
def test_ranks_that_are_asked_the_same_decide_alike(asked: list[Batch | float], name: str) -> None:
    first, second = PLANNERS[name]
    for planner in (first, second):
        planner.memory.apply([({}, Proposal(False, {}))])
    for each in asked:
        if isinstance(each, Batch):
            assert first.choose(each, AUTO) == second.choose(each, AUTO)
        else:
            for planner in (first, second):
                planner.memory.apply([({SPLIT: each - 1.0}, Proposal(False, {}))])


PLANNERS = {name: [MACHINES[name].open_planner() for _ in range(2)] for name in ("alike, doubted", "side")}


@pytest.mark.parametrize("name", ["alike", "side"])
def test_ranks_that_share_a_step_decide_as_if_each_was_the_largest(name: str) -> None:
    planner = MACHINES[name].open_planner()
    tokens = (2048, 501, 1500)
    shared = planner.choose_data_parallel(tokens, ALWAYS)
    alike = planner.choose_data_parallel((2048,) * 3, ALWAYS)
    assert isinstance(shared, SplitChoice)
    assert isinstance(alike, SplitChoice)
    assert shared.prediction == alike.prediction
    assert shared.slices == ()
    assert tuple(map(sum, zip(*shared.sizes, strict=True))) == tokens
    assert len(shared.sizes) == shared.prediction.micro_batches
    timeline = Predictor(*MACHINES[name]).simulate(
        shared.order.schedule, [BatchFeatures(max(sizes)) for sizes in shared.sizes]
    )
    assert shared.prediction.split == pytest.approx(compute_end(timeline), rel=5e-3)


@pytest.mark.parametrize("few", [1, 2])
def test_a_rank_with_few_tokens_is_padded(few: int) -> None:
    """What it computes in addition counts where it is the largest part, and it is not here."""
    planner = MACHINES["alike"].open_planner()
    shared = planner.choose_data_parallel((4096, few), replace(ALWAYS, micro_batches=3))
    alike = planner.choose_data_parallel((4096, 4096), replace(ALWAYS, micro_batches=3))
    assert isinstance(shared, SplitChoice)
    assert isinstance(alike, SplitChoice)
    assert shared.prediction == alike.prediction
    assert [of_rank for _, of_rank in shared.sizes] == [few, 1, 1]


@pytest.mark.parametrize("tokens", [(2, 2), (1, 2)])
def test_ranks_with_fewer_tokens_than_micro_batches_are_asked_for_split_in_fewer(tokens: tuple[int, int]) -> None:
    shared = MACHINES["alike"].open_planner().choose_data_parallel(tokens, replace(ALWAYS, micro_batches=3))
    assert isinstance(shared, SplitChoice)
    assert shared.sizes == ((1, 1), (1, 1))
    assert shared.prediction.micro_batches == 2


def test_ranks_with_a_token_each_stay_unsplit() -> None:
    declined = MACHINES["alike"].open_planner().choose_data_parallel((1, 1), ALWAYS)
    assert isinstance(declined, Decline)
    assert declined.reason == "nowhere to cut"


# Settings


@pytest.mark.parametrize("parts", [2, 3, 4])
def test_always_splits_into_as_many_micro_batches_as_the_settings_say(parts: int) -> None:
    planner = MACHINES["unlike"].open_planner()
    for tokens in (4096, 512, 64):
        choice = split(planner, Batch((tokens,), tokens), replace(ALWAYS, micro_batches=parts))
        assert len(choice.slices) == len(choice.order.programs) == parts
        assert sum(piece.size for piece in choice.slices) == tokens


def test_always_splits_where_ops_could_be_on_side_unsplit() -> None:
    choice = split(MACHINES["side"].open_planner(), Batch((64,), 64), ALWAYS)
    assert choice.prediction.micro_batches > 1


@pytest.mark.parametrize("side", ["on", "off", "auto"])
def test_ops_are_on_side_where_the_settings_say(side: str) -> None:
    planner = MACHINES["side"].open_planner()
    config = replace(AUTO, side=side, margin=0.0)
    batches = [Batch((tokens,), tokens) for tokens in (2048, 512, 96)]
    choices = [choice for batch in batches if isinstance(choice := planner.choose(batch, config), SplitChoice)]
    lanes = [SIDE in choice.order.programs[0].lanes for choice in choices]
    assert lanes
    assert all(lanes) if side != "off" else not any(lanes)


def test_settings_that_say_nothing_of_orders_prepare_nothing_anew() -> None:
    planner = MACHINES["unlike"].open_planner()
    planner.prepare(AUTO)
    orders = planner.orders
    planner.prepare(replace(AUTO, margin=0.5, mode="always", probation=True))
    assert all(before is after for before, after in zip(orders, planner.orders, strict=True))
    planner.prepare(replace(AUTO, policy=("alternate", 0)))
    assert [order.name.split("-")[0] for order in planner.orders] == ["alternate"] * 2


def test_each_number_of_micro_batches_has_a_book_of_its_own() -> None:
    planner = MACHINES["side"].open_planner()
    planner.prepare(AUTO)
    assert {len(order.programs) for order in planner.orders} == {1, 2, 3}
    planner.prepare(replace(AUTO, side="off", micro_batches=4))
    assert {len(order.programs) for order in planner.orders} == {2, 3, 4}


@pytest.mark.parametrize("parts", [3, 4])
def test_there_are_fewer_micro_batches_than_the_settings_say_where_a_batch_allows_no_more_cuts(parts: int) -> None:
    planner = MACHINES["alike"].open_planner()
    choice = split(planner, Batch((500, 600), 1100, cuttable=False), replace(ALWAYS, micro_batches=parts))
    assert [piece.size for piece in choice.slices] == [500, 600]


# Steps that are not as expected


@pytest.mark.parametrize("config", [AUTO, ALWAYS], ids=["auto", "always"])
@pytest.mark.parametrize("batch", [Batch((1,), 1), Batch((1,), 0), Batch((500,), 500, cuttable=False)])
def test_what_cannot_be_cut_is_declined(batch: Batch, config: RuntimeConfig) -> None:
    planner = MACHINES["alike"].open_planner()
    for _ in range(2):
        assert planner.choose(batch, config) == Decline("nowhere to cut", f"{batch.tokens} tokens")


@pytest.mark.parametrize("name", ["alike", "unlike, contended"])
def test_steps_larger_than_the_limits_are_planned(name: str) -> None:
    planner = MACHINES[name].open_planner(ServingLimits(256, 4, 512))
    choice = split(planner, PROMPT)
    assert choice.prediction.split == pytest.approx(simulate(MACHINES[name], PROMPT, choice), rel=0.1)
    split(MACHINES[name].open_planner(ServingLimits(3, 1, 3)), PROMPT)


@pytest.mark.parametrize("limits", [ServingLimits(1, 1, 1), ServingLimits(1, 256, 1000), ServingLimits(8192, 1, 1)])
def test_where_no_step_can_be_cut_none_is(limits: ServingLimits) -> None:
    planner = MACHINES["alike, contended"].open_planner(limits)
    assert planner.orders == []
    for batch in (Batch((1,), 1), PROMPT):
        assert decline(planner, batch, ALWAYS).reason == "nowhere to cut"
    assert isinstance(planner.choose_data_parallel((100, 100), ALWAYS), Decline)


@pytest.mark.parametrize("contention", [{}, {"compute": 1.1, "comm": 1.3}])
def test_ops_that_cost_nothing_are_planned(contention: dict[str, float]) -> None:
    costs = {"attention": ComputeCost(), "reduce": CommCost(0.0, 0.0, BYTES)}
    planner = Planner(PROGRAM, make_table(PROGRAM, costs, contention=contention), LIMITS, FEW_STATES)
    for _ in range(2):
        assert split(planner, PROMPT, ALWAYS).prediction.gain == 0
        decline(planner, PROMPT, AUTO)


def test_unsplit_steps_that_are_predicted_to_take_no_time_stay_unsplit() -> None:
    """Outside its ops, a graph saves more than small steps take."""
    planner = make_alike(host=HostCost(unsplit=-10e-3)).open_planner()
    for tokens in (64, 60, 512):
        for _ in range(2):
            assert decline(planner, Batch((tokens,), tokens)).expected == 0
            assert split(planner, Batch((tokens,), tokens), ALWAYS).prediction.gain == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a3-layer-4894", "r1-tp16-941", "910b-profile-4894"])
def test_published_models_of_all_layers_are_planned_as_by_a_search(name: str) -> None:
    case = get_case(name)
    machine = PreparedMachine(build_program(case.table.program), case.table)
    planner, searching = Planner(*machine, ServingLimits(tokens=16_384)), SearchingPlanner(*machine)
    rng = random.Random(name)
    differing, errors, longer = 0, [], []
    for batch in (draw_prompts(rng) for _ in range(30)):
        decision, searched = planner.choose(batch, AUTO), searching.choose(batch, AUTO)
        differing += isinstance(decision, SplitChoice) != isinstance(searched, SplitChoice)
        if isinstance(decision, SplitChoice) and isinstance(searched, SplitChoice):
            seconds = simulate(machine, batch, decision)
            errors.append(abs(decision.prediction.split / seconds - 1.0))
            longer.append(seconds / simulate(machine, batch, searched) - 1.0)
    assert errors, "a case of prompts that are split"
    assert differing <= 1
    assert mean(errors) <= 0.005
    assert mean(longer) <= 0.005
