"""What micro-batches ask of the ops, counted token by token; and cuts that make them cost alike."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbo_runtime.batch import Batch, BatchSlice, place_cuts, slice_batch
from dbo_runtime.planner.costs.batch_features import BatchFeatures, measure_features
from dbo_runtime.planner.costs.op_cost import ComputeCost
from dbo_runtime.planner.online.cuts import (
    CostSums,
    Density,
    balance_targets,
    compute_density,
    measure_batch,
    measure_slices,
)
from tests.support.planner.cost_tables import make_table
from tests.support.programs import record_toy
from tests.support.strategies import batches

TOKENS_ONLY = Density(1.0)
MASKED, DENSE = Density(0.0, pair=1.0, context_pair=1.0), Density(0.0, pair=2.0, context_pair=1.0)
PROMPT = Batch((10_000,), 10_000)


@st.composite
def cut_batches(draw: st.DrawFn) -> tuple[Batch, tuple[BatchSlice, ...]]:
    """Batches with contexts, cut anywhere; cuts that other ranks count on may leave pieces of any length."""
    batch = replace(draw(batches()), cuttable=True)
    lengths = len(batch.query_lens)
    contexts = draw(st.just(()) | st.lists(st.integers(0, 50), min_size=lengths, max_size=lengths).map(tuple))
    cuts = draw(st.sets(st.integers(1, batch.tokens - 1), max_size=3)) if batch.tokens > 1 else set()
    batch = replace(batch, context_lens=contexts)
    return batch, slice_batch(batch, sorted(cuts), agreed=True)


def count_load(batch: Batch, piece: BatchSlice) -> BatchFeatures:
    """Count the keys that each token of a micro-batch meets: of its own request, up to itself, new and cached ones."""
    features = BatchFeatures(0)
    first = 0
    for length, context in zip(batch.query_lens, batch.contexts, strict=True):
        own = [token - first for token in range(piece.first_token, piece.last_token) if 0 <= token - first < length]
        first += length
        features = features._replace(tokens=features.tokens + len(own))
        if len(own) > batch.decode_len:
            features = features._replace(
                pairs=features.pairs + sum(position - own[0] + 1 for position in own),
                context_pairs=features.context_pairs + sum(context + own[0] for _ in own),
                prefills=features.prefills + 1,
                context=features.context + context + own[0],
            )
        else:
            pairs = sum(context + own[-1] + 1 for _ in own)
            features = features._replace(
                decodes=features.decodes + len(own), decode_pairs=features.decode_pairs + pairs
            )
    return features


@given(cut_batches())
def test_the_features_of_a_micro_batch_are_those_of_its_tokens(
    case: tuple[Batch, tuple[BatchSlice, ...]],
) -> None:
    batch, slices = case
    assert measure_slices(batch, slices) == tuple(count_load(batch, piece) for piece in slices)


@given(cut_batches(), st.integers(0, 4))
def test_the_features_of_a_batch_are_those_of_its_requests(
    case: tuple[Batch, tuple[BatchSlice, ...]], decode_len: int
) -> None:
    batch = replace(case[0], decode_len=decode_len)
    assert measure_batch(batch) == measure_features(batch.query_lens, batch.context_lens, decode_len)


@given(cut_batches())
def test_cutting_loses_no_token_and_no_pair(case: tuple[Batch, tuple[BatchSlice, ...]]) -> None:
    batch, slices = case
    batch = replace(batch, decode_len=0)  # short pieces are prefills, too
    (unsplit,) = measure_slices(batch, slice_batch(batch, ()))
    slice_features = measure_slices(batch, slices)
    assert sum(features.tokens for features in slice_features) == unsplit.tokens
    assert (
        sum(features.pairs + features.context_pairs for features in slice_features)
        == unsplit.pairs + unsplit.context_pairs
    )
    assert sum(features.pairs for features in slice_features) <= unsplit.pairs


@pytest.mark.parametrize(
    ("density", "share"),
    [
        (TOKENS_ONLY, 1 / 2),
        (MASKED, 1 / math.sqrt(2)),  # half of a triangle's area
        (DENSE, (math.sqrt(5) - 1) / 2),  # x * x = (1 - x) * 1
    ],
    ids=["tokens", "masked pairs", "dense pairs"],
)
def test_a_prompt_is_cut_where_both_parts_cost_the_same(density: Density, share: float) -> None:
    assert balance_targets(CostSums(PROMPT, density), 2)[0] == pytest.approx(share * PROMPT.tokens, abs=1)


def test_three_parts_of_a_prompt_cost_the_same() -> None:
    first, second = balance_targets(CostSums(PROMPT, MASKED), 3)
    assert first == pytest.approx(PROMPT.tokens * math.sqrt(1 / 3), abs=1)
    assert second == pytest.approx(PROMPT.tokens * math.sqrt(2 / 3), abs=1)


@pytest.mark.parametrize("density", [TOKENS_ONLY, MASKED, DENSE], ids=["tokens", "masked pairs", "dense pairs"])
@pytest.mark.parametrize("parts", [2, 4])
def test_equal_requests_are_parted_between_them(density: Density, parts: int) -> None:
    batch = Batch((500,) * 8, 4000)
    edges = tuple(4000 * part // parts for part in range(1, parts))
    assert place_cuts(batch, balance_targets(CostSums(batch, density), parts)) == edges


def test_what_is_in_the_kv_cache_counts() -> None:
    """Two prompts of 100 tokens, the second of which looks back on 900 more: it has nearly all pairs to itself."""
    batch = Batch((100, 100), 200, context_lens=(0, 900))
    pairs = 100 * 101 / 2
    assert MASKED.estimate_seconds(measure_slices(batch, slice_batch(batch, (100,)))[0]) == pairs
    (cut,) = balance_targets(CostSums(batch, MASKED), 2)
    before, after = (
        MASKED.estimate_seconds(features) for features in measure_slices(batch, slice_batch(batch, (cut,)))
    )
    assert cut > 140
    assert before == pytest.approx(after, rel=0.03)


@given(batches(), st.integers(2, 4))
def test_a_target_is_the_first_offset_that_has_its_share_before_it(batch: Batch, parts: int) -> None:
    batch = replace(batch, decode_len=0, cuttable=True)
    density = Density(2.0, pair=0.5, context_pair=0.5)
    unsplit = density.estimate_seconds(measure_slices(batch, slice_batch(batch, ()))[0])

    def measure_before(offset: int) -> float:
        if offset == batch.tokens:
            return unsplit
        return density.estimate_seconds(measure_slices(batch, slice_batch(batch, (offset,)))[0])

    for part, target in enumerate(balance_targets(CostSums(batch, density), parts), 1):
        assert measure_before(target) >= unsplit * part / parts - 1e-6
        assert target == 1 or measure_before(target - 1) < unsplit * part / parts + 1e-6


@given(cut_batches(), st.integers(2, 4))
def test_a_target_divides_what_both_sides_cost_whatever_costs_time(
    case: tuple[Batch, tuple[BatchSlice, ...]], parts: int
) -> None:
    """With contexts, decodes, and pieces that turn into decodes: each costs what its features say."""
    batch = case[0]
    density = Density(2.0, 0.5, 0.25, 30.0, 0.125, 3.0, 0.0625)

    def has_share(offset: int, share: float, slack: float) -> bool:
        cuts = () if offset in (0, batch.tokens) else (offset,)
        costs = [density.estimate_seconds(one) for one in measure_slices(batch, slice_batch(batch, cuts, agreed=True))]
        before = 0.0 if offset == 0 else costs[0]
        return before >= share * sum(costs) - slack

    for part, target in enumerate(balance_targets(CostSums(batch, density), parts), 1):
        assert has_share(target, part / parts, 1e-6)
        assert target == 0 or not has_share(target - 1, part / parts, -1e-6)


def test_what_a_density_does_not_name_costs_nothing() -> None:
    assert TOKENS_ONLY.estimate_seconds(BatchFeatures(2, *[1.0] * 6)) == 2.0


def test_the_density_is_what_all_layers_add_up_to() -> None:
    attention = ComputeCost(1e-6, 3e-6, 9e-6, 1e-9, 8e-9, 4e-6, 5e-9, 6e-6, 7e-9)
    table = make_table({"attention": attention, "mlp": ComputeCost(per_token=2e-6, per_pair=7e-9)})
    density = compute_density(table, record_toy(layers=3))
    expected = Density(15e-6, 24e-9, 24e-9, 12e-6, 15e-9, 18e-6, 21e-9)
    assert tuple(density) == pytest.approx(tuple(expected))
