"""Steps that stand for all that a scheduler may put together."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dbo_runtime.planner.online.shapes import SMALLEST_STEP, ServingLimits, list_shapes
from tests.support.profiles import scale

SIZES = st.integers(1, 40) | st.integers(41, 20_000)
LIMITS = st.builds(ServingLimits, SIZES, st.integers(1, 600), SIZES)


@settings(max_examples=scale(100))
@given(LIMITS)
def test_no_shape_exceeds_the_limits(limits: ServingLimits) -> None:
    for batch in list_shapes(limits):
        assert 1 <= batch.tokens <= limits.tokens
        assert 1 <= len(batch.query_lens) <= limits.requests
        assert len(batch.context_lens) == len(batch.query_lens)
        assert min(batch.query_lens) >= 1
        assert min(batch.context_lens) >= 0
        assert max(new + old for new, old in zip(batch.query_lens, batch.context_lens, strict=True)) <= limits.context


@settings(max_examples=scale(100))
@given(LIMITS)
def test_they_go_from_small_ones_to_the_largest_and_each_is_listed_once(limits: ServingLimits) -> None:
    shapes = list_shapes(limits)
    largest = min(limits.tokens, limits.requests * limits.context)
    sizes = sorted({batch.tokens for batch in shapes})
    assert len(set(shapes)) == len(shapes) <= 200
    assert sizes[-1] == largest
    assert sizes[0] == min(SMALLEST_STEP, largest)
    assert all(right <= 2 * left for left, right in pairwise(sizes))


def test_there_are_prompts_alone_several_after_a_context_and_with_decodes_and_decodes_alone() -> None:
    limits = ServingLimits(tokens=64, requests=64, context=1024)
    largest = [batch for batch in list_shapes(limits) if batch.tokens == 64]
    kinds = [(len(batch.query_lens), batch.prefill_tokens, max(batch.context_lens)) for batch in largest]
    prompts, decodes = kinds[:5], kinds[5:]
    assert prompts == [(1, 64, 0), (1, 64, 120), (1, 64, 480), (4, 64, 0), (17, 48, 256)]
    assert decodes == [(64, 0, 51), (64, 0, 255), (64, 0, 1023)]


@pytest.mark.parametrize(
    ("limits", "lengths"),
    [
        (ServingLimits(1, 1, 1), {(1,)}),
        (ServingLimits(1, 256, 1000), {(1,)}),
        (ServingLimits(2, 1, 1000), {(2,)}),
        (ServingLimits(6, 2, 4), {(3, 3)}),
        (ServingLimits(1000, 3, 5), {(5, 5, 5)}),
    ],
)
def test_the_smallest_limits_have_shapes(limits: ServingLimits, lengths: set[tuple[int, ...]]) -> None:
    assert {batch.query_lens for batch in list_shapes(limits)} == lengths
