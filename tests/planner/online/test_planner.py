"""Whether, where and in which order to split: what the planner makes of costs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dbo_runtime.batch import Batch
from dbo_runtime.config import RuntimeConfig
from dbo_runtime.decline import Decline
from dbo_runtime.errors import ConfigError
from dbo_runtime.ir.policies import staggered
from dbo_runtime.ir.validate import validate
from dbo_runtime.lab.oracle.searching_planner import SearchingPlanner
from dbo_runtime.planner.costs.batch_features import BatchFeatures
from dbo_runtime.planner.costs.op_cost import CommCost, ComputeCost, HostCost, OpCost
from dbo_runtime.planner.online.ab_trial import Proposal
from dbo_runtime.planner.online.candidates import Candidates
from dbo_runtime.planner.online.correction import SPLIT, UNSPLIT
from dbo_runtime.planner.online.cuts import measure_slices
from dbo_runtime.planner.online.planner import Planner
from dbo_runtime.planner.online.predictor import Predictor
from dbo_runtime.planner.online.split_choice import SplitChoice
from dbo_runtime.planner.search.search import ROUNDING
from tests.support.planner.known_costs import COSTS
from tests.support.planner.machines import BYTES, PROGRAM, make_table, measure_unsplit, record_layers, simulate_split
from tests.support.profiles import scale
from tests.support.strategies import batches

PROMPT = Batch((4096,), 4096)
DECODES = Batch((1,) * 64, 0, context_lens=(1000,) * 64)
AUTO = RuntimeConfig()
ALWAYS = RuntimeConfig(mode="always")
FEW_STATES = 1_000


BOTH = pytest.mark.parametrize("kind", [SearchingPlanner, Planner], ids=["searching", "prepared"])


def open_planner(error: float = 0.0, kind: type[Planner] = Planner, **changes: object) -> Planner:
    return kind(PROGRAM, make_table(PROGRAM, COSTS, error, **changes), max_states=FEW_STATES)


def split(planner: Planner, batch: Batch, config: RuntimeConfig) -> SplitChoice:
    choice = planner.choose(batch, config)
    assert isinstance(choice, SplitChoice), choice
    return choice


def decline(planner: Planner, batch: Batch, config: RuntimeConfig) -> Decline:
    choice = planner.choose(batch, config)
    assert isinstance(choice, Decline), choice
    return choice


def simulate_exactly(planner: Planner, batch: Batch, choice: SplitChoice) -> float:
    """Return what a step takes with the loads that its micro-batches have, and not with those of their buckets."""
    return simulate_split(planner.program, planner.table, choice, measure_slices(batch, choice.slices))


# What is chosen


@BOTH
def test_a_prompt_is_split_where_that_pays(kind: type[Planner]) -> None:
    choice = split(open_planner(kind=kind), PROMPT, AUTO)
    assert sum(piece.size for piece in choice.slices) == PROMPT.tokens
    assert len(choice.slices) == choice.prediction.micro_batches >= 2
    assert choice.prediction.gain > 0.2
    assert choice.sizes == ()


@pytest.mark.slow
@BOTH
def test_a_prompt_stays_unsplit_where_split_steps_took_longer_than_predicted_by_as_much_as_is_gained(
    kind: type[Planner],
) -> None:
    sure = split(open_planner(kind=kind), PROMPT, AUTO).prediction
    longer = sure.unsplit / sure.split - 1
    assert split(open_planner(kind=kind, split_error=longer * 0.99), PROMPT, AUTO).prediction.worst_case > 0
    declined = decline(open_planner(kind=kind, split_error=longer * 1.01), PROMPT, AUTO)
    assert declined.reason == "no gain predicted"
    assert split(open_planner(kind=kind, split_error=longer * 1.01), PROMPT, ALWAYS)


@BOTH
def test_an_order_that_is_chosen_is_safe(kind: type[Planner]) -> None:
    for parts in (2, 3, 4):
        choice = split(open_planner(kind=kind), PROMPT, replace(AUTO, micro_batches=parts))
        assert len(choice.order.schedule.programs) == parts
        validate(choice.order.schedule)


@BOTH
def test_always_splits_even_where_it_loses(kind: type[Planner]) -> None:
    planner = open_planner(kind=kind)
    small = Batch((64,), 64)
    assert split(planner, small, ALWAYS).prediction.gain < 0
    decline(planner, small, AUTO)


@BOTH
def test_a_margin_that_is_not_reached_leaves_the_step_unsplit(kind: type[Planner]) -> None:
    planner = open_planner(kind=kind)
    gain = split(planner, PROMPT, AUTO).prediction.gain
    decline(open_planner(kind=kind), PROMPT, replace(AUTO, margin=gain + 1e-3))
    split(open_planner(kind=kind), PROMPT, replace(AUTO, margin=gain - 1e-3))


@BOTH
def test_a_decline_carries_what_was_predicted(kind: type[Planner]) -> None:
    planner = open_planner(kind=kind)
    batch = Batch((64,), 64)
    declined = decline(planner, batch, replace(AUTO, margin=0.03))
    assert declined.reason == "no gain predicted"
    predicted = split(planner, batch, ALWAYS).prediction
    assert predicted.gain < 0
    assert declined.detail.startswith(f"{predicted}; DBO_MARGIN asks for more than 3.0% less")
    assert declined.expected == pytest.approx(planner.predict_unsplit(measure_unsplit(batch)))


@BOTH
@pytest.mark.parametrize("parts", [2, 3, 5])
def test_as_many_micro_batches_as_the_settings_say(kind: type[Planner], parts: int) -> None:
    choice = split(open_planner(kind=kind), PROMPT, replace(ALWAYS, micro_batches=parts))
    assert len(choice.slices) == choice.prediction.micro_batches == parts


@BOTH
@pytest.mark.parametrize(
    ("ops", "best"), [(("attention", "reduce"), 2), (("long", "reduce", "short", "long_reduce"), 3)]
)
def test_without_a_number_the_best_is_taken(kind: type[Planner], ops: Sequence[str], best: int) -> None:
    """Alike phases of high fixed cost gain nothing by a third micro-batch; unlike ones do."""
    costs: dict[str, OpCost] = {
        "attention": ComputeCost(20e-6, 0.1e-6),
        "long": ComputeCost(1e-6, 0.5e-6),
        "short": ComputeCost(1e-6, 0.15e-6),
        "reduce": CommCost(20e-6 if best == 2 else 1e-6, 0.1e-6 / BYTES, BYTES),
        "long_reduce": CommCost(1e-6, 0.5e-6 / BYTES, BYTES),
    }
    program = record_layers(8, ops)
    planner = kind(program, make_table(program, {op: costs[op] for op in ops}), max_states=FEW_STATES)
    taken = {parts: split(planner, PROMPT, replace(ALWAYS, micro_batches=parts)).prediction.split for parts in (2, 3)}
    choice = split(planner, PROMPT, AUTO)
    assert min(taken, key=taken.__getitem__) == choice.prediction.micro_batches == best
    assert choice.prediction.split == taken[best]


@BOTH
def test_the_order_that_the_settings_name_is_taken(kind: type[Planner]) -> None:
    choice = split(open_planner(kind=kind), PROMPT, replace(AUTO, policy=("staggered", 1), micro_batches=2))
    assert choice.order.order == staggered((PROGRAM,) * 2, 1)


@pytest.mark.parametrize("contention", [{}, {"compute": 1.1, "comm": 1.3}])
@pytest.mark.parametrize("micro_batches", [2, 3])
def test_no_policy_is_predicted_faster_than_what_is_searched_for(
    contention: dict[str, float], micro_batches: int
) -> None:
    program = record_layers(4, ("first", "first_reduce", "second", "second_reduce"))
    rng = random.Random(0)
    costs = {
        op.name: CommCost(1e-6, rng.uniform(1, 9) * 1e-7 / BYTES, BYTES)
        if op.lane == "comm"
        else ComputeCost(1e-6, rng.uniform(1, 9) * 1e-7)
        for op in program.ops[:4]
    }
    planner = SearchingPlanner(program, make_table(program, costs, contention=contention), FEW_STATES)
    features = [BatchFeatures(1023)] * micro_batches  # the middle of a bucket: orders are searched for there
    found = planner.predict_split(features, ALWAYS)
    for policy in (("alternate", 0), ("staggered", 1), ("sequential", 0)):
        assert found <= planner.predict_split(features, replace(ALWAYS, policy=policy)) * 1.01  # shares are rounded


@BOTH
def test_attention_moves_the_cut_to_where_both_parts_cost_the_same(kind: type[Planner]) -> None:
    quadratic = {**COSTS, "attention": ComputeCost(per_pair=1e-10, per_context_pair=1e-10)}
    planner = kind(PROGRAM, make_table(PROGRAM, quadratic), max_states=FEW_STATES)
    choice = split(planner, PROMPT, replace(AUTO, micro_batches=2))
    assert choice.slices[0].size == pytest.approx(PROMPT.tokens / 2**0.5, rel=0.01)


@BOTH
@pytest.mark.parametrize("batch", [Batch((1,), 1), Batch((1,), 0), Batch((500,), 500, cuttable=False)])
@pytest.mark.parametrize("config", [AUTO, ALWAYS], ids=["auto", "always"])
def test_what_cannot_be_cut_is_declined(kind: type[Planner], batch: Batch, config: RuntimeConfig) -> None:
    assert decline(open_planner(kind=kind), batch, config).reason == "nowhere to cut"


@BOTH
def test_decodes_that_wait_for_weights_stay_unsplit(kind: type[Planner]) -> None:
    declined = decline(open_planner(kind=kind), DECODES, AUTO)
    assert declined.reason == "no gain predicted"
    assert declined.expected is not None


@BOTH
def test_decodes_are_split_where_communication_is_what_they_wait_for(kind: type[Planner]) -> None:
    costs = {"attention": ComputeCost(1e-6, 1e-6), "reduce": CommCost(1e-6, 1e-6 / BYTES, BYTES)}
    planner = kind(PROGRAM, make_table(PROGRAM, costs), max_states=FEW_STATES)
    choice = split(planner, DECODES, replace(AUTO, micro_batches=2))
    assert [piece.size for piece in choice.slices] == [32, 32]


@settings(max_examples=scale(200))
@given(
    st.floats(0, 100),
    st.floats(0, 1),
    st.floats(0, 0.01),
    st.floats(0, 0.01),
    st.floats(0, 100),
    st.floats(0, 1),
    st.floats(0, 2000),
    st.integers(2, 2000),
)
@example(0.0, 0.234375, 0.0, 0.0, 0.0, 0.0, 0.0, 2)  # gains 3e-16 by rounding
def test_what_is_declined_by_its_size_alone_gains_nothing(
    fixed: float,
    per_token: float,
    per_pair: float,
    per_context_pair: float,
    alpha: float,
    beta: float,
    added: float,
    tokens: int,
) -> None:
    """All costs are in microseconds."""
    pairs = {"per_pair": per_pair * 1e-6, "per_context_pair": per_context_pair * 1e-6}
    costs: dict[str, OpCost] = {
        "attention": ComputeCost(fixed * 1e-6, per_token * 1e-6, **pairs),
        "reduce": CommCost(alpha * 1e-6, beta * 1e-6 / BYTES, BYTES),
    }
    planner = Planner(PROGRAM, make_table(PROGRAM, costs, host=HostCost(split=added * 1e-6)), max_states=FEW_STATES)
    if planner.decline_early(tokens) is not None:
        quick = replace(ALWAYS, policy=("alternate", 0), micro_batches=2)
        assert split(planner, Batch((tokens,), tokens, decode_len=0), quick).prediction.gain <= ROUNDING


def test_most_small_steps_are_declined_by_their_size_alone() -> None:
    planner = open_planner(host=HostCost(split=3e-3))
    declined = [tokens for tokens in (1, 8, 64, 512, 4096) if planner.decline_early(tokens) is not None]
    assert declined == [1, 8, 64, 512]
    assert planner.decline_early(64) is planner.decline_early(64)


def test_an_op_without_a_cost_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="op 'second_reduce' has no cost"):
        Planner(record_layers(2, ("attention", "reduce", "second_reduce")), make_table(PROGRAM, COSTS))


# What is predicted


def test_an_unsplit_step_takes_what_its_ops_take_one_after_the_other() -> None:
    planner = open_planner(host=HostCost(unsplit=3e-3, split=1e-3))
    features = measure_unsplit(PROMPT)
    assert planner.predict_unsplit(features) == pytest.approx(3e-3 + sum(planner.table.times(PROGRAM, features)))


def test_an_unsplit_step_takes_no_less_than_its_host() -> None:
    planner = open_planner(host=HostCost(issue=1.0))
    assert planner.predict_unsplit(measure_unsplit(PROMPT)) == len(PROGRAM.ops)


def test_what_the_host_adds_to_a_split_step_counts() -> None:
    without, added = (
        split(open_planner(host=HostCost(split=seconds)), PROMPT, ALWAYS).prediction.split for seconds in (0.0, 5e-3)
    )
    assert added == pytest.approx(without + 5e-3)


@settings(max_examples=scale(150))
@given(batches(), st.sampled_from([2, 3]), st.sampled_from([0, 500]))
def test_predictions_are_close_to_what_the_exact_features_would_take(batch: Batch, parts: int, context: int) -> None:
    planner = open_planner()
    batch = replace(batch, context_lens=(context,) * len(batch.query_lens))
    choice = planner.choose(batch, replace(ALWAYS, micro_batches=parts, policy=("alternate", 0)))
    if isinstance(choice, SplitChoice):
        assert choice.prediction.split == pytest.approx(simulate_exactly(planner, batch, choice), rel=0.04)


def test_a_message_that_follows_another_at_once_is_predicted_to_pay_for_all_of_itself() -> None:
    reduce = CommCost(1e-6, 1e-6 / BYTES, BYTES, free_bytes=100 * BYTES)
    costs = {**COSTS, "attention": ComputeCost(1e-6), "reduce": reduce}
    table, slice_features = make_table(PROGRAM, costs), [BatchFeatures(1000)] * 2
    order = Candidates(PROGRAM, FEW_STATES).make_policy("alternate", 0, 2)
    drawn = Predictor(PROGRAM, table).simulate(order.schedule, slice_features)
    sent = [span.end - span.start for span in drawn.spans if span.lane == "comm"]
    assert sent[0] == pytest.approx(901e-6)
    assert sent[1:] == pytest.approx([1000e-6 + 1e-6] * (len(sent) - 1), rel=0.01)  # attention gives hardly any rest


# What is remembered and learnt


def test_a_batch_that_was_seen_is_decided_alike_also_after_nothing_was_learnt() -> None:
    planner = open_planner()
    for batch in (PROMPT, DECODES):
        first = planner.choose(batch, AUTO)
        second = planner.choose(replace(batch), replace(AUTO))
        planner.memory.apply([({}, Proposal(False, {}))])
        third = planner.choose(batch, AUTO)
        assert second == third
        for one, other in ((first, second),) if isinstance(first, SplitChoice) else ():
            assert isinstance(other, SplitChoice)
            assert (one.order, one.cut) == (other.order, other.cut)
            assert one.prediction.unsplit == pytest.approx(other.prediction.unsplit)


@BOTH
def test_settings_are_remembered_separately(kind: type[Planner]) -> None:
    planner = open_planner(kind=kind)
    assert len(split(planner, PROMPT, replace(ALWAYS, micro_batches=2)).slices) == 2
    assert len(split(planner, PROMPT, replace(ALWAYS, micro_batches=3)).slices) == 3


@BOTH
def test_steps_that_take_longer_than_predicted_are_not_split_any_more(kind: type[Planner]) -> None:
    planner = open_planner(kind=kind)
    predicted = split(planner, PROMPT, AUTO).prediction
    learn(planner, SPLIT, 1.5)
    declined = decline(planner, PROMPT, AUTO)
    assert f"{predicted.split * 1.5 * 1e3:.2f} ms in" in declined.detail
    learn(planner, UNSPLIT, 1.5)
    assert split(planner, PROMPT, AUTO).prediction.gain == pytest.approx(predicted.gain)


def test_what_is_learnt_does_not_build_up() -> None:
    """A prediction with the correction in it, noted against what was measured, asks for nothing more."""
    planner = open_planner()
    learn(planner, UNSPLIT, 1.2)
    features = measure_unsplit(PROMPT)
    corrected = planner.predict_unsplit(features)
    planner.memory.observe(UNSPLIT, corrected, corrected)
    learn(planner, UNSPLIT, 1.0, times=20)
    assert planner.predict_unsplit(features) == pytest.approx(corrected)


@BOTH
def test_a_split_stays_while_half_of_the_margin_is_left(kind: type[Planner]) -> None:
    planner, other = open_planner(kind=kind), open_planner(kind=kind)
    prediction = split(planner, PROMPT, AUTO).prediction
    gain = 0.7 * AUTO.margin
    for each in (planner, other):
        learn(each, SPLIT, (1 - gain) * prediction.unsplit / prediction.split)
    assert split(planner, PROMPT, AUTO).prediction.gain == pytest.approx(gain)
    decline(other, PROMPT, AUTO)


@settings(max_examples=scale(50))
@given(st.lists(batches(), max_size=4), st.floats(0.7, 1.4))
def test_ranks_that_are_asked_the_same_decide_alike(asked: list[Batch], learnt: float) -> None:
    first, second = open_planner(), open_planner()
    for planner in (first, second):
        learn(planner, SPLIT, learnt)
    quick = replace(AUTO, policy=("alternate", 0))
    for batch in asked:
        assert first.choose(batch, quick) == second.choose(batch, quick)


def learn(planner: Planner, mode: str, ratio: float, times: int = 40) -> None:
    """Let a planner learn that steps take *ratio* times what its costs say."""
    planner.memory.observe(mode, planner.memory.correction.factor(mode), ratio)
    for _ in range(times):
        planner.memory.apply([(planner.memory.correction.propose(), Proposal(False, {}))])


# Data parallel ranks


@BOTH
def test_ranks_that_share_a_step_get_sizes_that_add_up(kind: type[Planner]) -> None:
    tokens = (4096, 1001, 3000)
    choice = open_planner(kind=kind).choose_data_parallel(tokens, AUTO)
    assert isinstance(choice, SplitChoice)
    assert choice.slices == ()
    assert len(choice.sizes) == choice.prediction.micro_batches
    assert tuple(map(sum, zip(*choice.sizes, strict=True))) == tokens
    assert all(max(sizes) - min(sizes) <= 1 for sizes in zip(*choice.sizes, strict=True))
    validate(choice.order.schedule)


@BOTH
def test_every_rank_comes_to_the_same_choice(kind: type[Planner]) -> None:
    tokens = (4096, 1001, 3000)
    assert open_planner(kind=kind).choose_data_parallel(tokens, AUTO) == open_planner(kind=kind).choose_data_parallel(
        tokens, AUTO
    )


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("largest", [64, 512, 4096])
def test_the_largest_rank_decides(kind: type[Planner], largest: int) -> None:
    shared, break_even = (
        open_planner(kind=kind).choose_data_parallel(tokens, AUTO) for tokens in ((40, largest), (largest, largest))
    )
    assert isinstance(shared, SplitChoice) == isinstance(break_even, SplitChoice) == (largest > 64)
    if isinstance(shared, SplitChoice) and isinstance(break_even, SplitChoice):
        assert shared.prediction == break_even.prediction
    else:
        assert shared == break_even


@BOTH
def test_ranks_with_a_token_each_stay_unsplit(kind: type[Planner]) -> None:
    declined = open_planner(kind=kind).choose_data_parallel((1, 1), ALWAYS)
    assert isinstance(declined, Decline)
    assert declined.reason == "nowhere to cut"


@BOTH
def test_a_rank_with_few_tokens_is_padded_and_few_tokens_are_split_in_fewer_parts(kind: type[Planner]) -> None:
    for tokens, sizes in (((4096, 1), ((2048, 1),) * 2), ((2, 1), ((1, 1),) * 2)):
        shared = open_planner(kind=kind).choose_data_parallel(tokens, replace(ALWAYS, micro_batches=min(tokens[0], 2)))
        assert isinstance(shared, SplitChoice)
        assert shared.sizes == sizes
    three = open_planner(kind=kind).choose_data_parallel((2, 1), replace(ALWAYS, micro_batches=3))
    assert isinstance(three, SplitChoice)
    assert three.sizes == ((1, 1), (1, 1))
