"""The operator of Kimi-K3's attention residuals against plain loops."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.standin.cann.cann import StandIn
from tests.support.ascend.operators.attention_residuals import make_sums, mix_blocks, mix_plainly
from tests.support.ascend.operators.checks import (
    ANY_FORMAT,
    HALF,
    SEEDS,
    assert_equal,
    assert_near,
    covers,
    make_generator,
    put,
)
from tests.support.profiles import scale

pytestmark = ANY_FORMAT


@settings(max_examples=scale(20))
@given(seed=SEEDS, tokens=st.integers(1, 4), valid=st.integers(0, 3), adds=st.booleans(), writes=st.booleans())
@covers("_C_ascend::attn_res_fwd")
def test_sums_of_blocks_are_mixed(
    standin: StandIn, seed: int, tokens: int, valid: int, adds: bool, writes: bool
) -> None:
    """The bank changes in the row that is written only, and what is read nowhere."""
    tensors = make_sums(make_generator(seed), tokens, 4)
    total, added, bank, *weights = there = put(*tensors)
    written = 3 if writes else -1
    inputs = total, added if adds else None, bank, *weights
    out, found, mix = mix_blocks(*inputs, valid=valid, written=written, return_materialized=True)
    expected = mix_plainly(tensors, valid, adds)
    assert_near(out, expected[0], HALF)
    assert_equal(found.cpu().double(), expected[1])
    assert_near(mix, expected[2], HALF)
    kept = tensors[2].clone()
    if writes:
        kept[:, 3] = found.cpu()
    assert_equal([total, added, bank], [*tensors[:2], kept])
    assert (found.data_ptr() == there[0].data_ptr()) is not adds


def test_without_a_mix_the_sum_is_normed_alone_and_without_a_norm_the_mix_is_returned(standin: StandIn) -> None:
    tensors = make_sums(make_generator(0), 3, 4)
    there = put(*tensors)
    out, _, mix = mix_blocks(*there, valid=2, mix=False)
    assert_near(out, mix_plainly(tensors, 0, adds=True)[0], HALF)
    assert out.data_ptr() == mix.data_ptr()
    out, _, _ = mix_blocks(*there[:5], None, valid=2)
    assert_near(out, mix_plainly(tensors, 2, adds=True)[2], HALF)


def test_a_row_that_is_mixed_is_not_written(standin: StandIn) -> None:
    there = put(*make_sums(make_generator(0), 3, 4))
    with pytest.raises(NotImplementedError, match="writes row 1"):
        mix_blocks(*there, valid=2, written=1)
    with pytest.raises(NotImplementedError, match="5 of 4 rows"):
        mix_blocks(*there, valid=5)
