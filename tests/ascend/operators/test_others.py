"""Norms, products, sums, formats, and slots of tokens, against plain references."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.standin.cann.cann import StandIn
from tests.support.ascend.operators.blocks import get_slots, make_table
from tests.support.ascend.operators.checks import (
    ABSENT,
    ANY_FORMAT,
    SEEDS,
    TOLERANCE,
    assert_equal,
    assert_near,
    covers,
    draw,
    make_generator,
    npu,
    put,
)
from tests.support.profiles import scale

pytestmark = ANY_FORMAT


@pytest.mark.parametrize("of_x", [None, (0, 1, 2), (1, 0, 2)])
@pytest.mark.parametrize("of_weight", [None, (0, 1, 2), (0, 2, 1)])
@pytest.mark.parametrize("of_out", [None, (1, 0, 2)])
@covers("npu::npu_transpose_batchmatmul")
def test_batches_are_multiplied_in_the_order_that_is_asked_for(
    standin: StandIn, of_x: tuple[int, ...] | None, of_weight: tuple[int, ...] | None, of_out: tuple[int, ...] | None
) -> None:
    """What is not said is (0, 1, 2) for both factors, and (1, 0, 2) for the product, as torch_npu has it."""
    generator, batches = make_generator(0), 3
    matrices = [(draw(generator, 4, 5), draw(generator, 5, 6)) for _ in range(batches)]
    x = torch.stack([one for one, _ in matrices], 1 if of_x == (1, 0, 2) else 0)
    weight = torch.stack([other.T if of_weight == (0, 2, 1) else other for _, other in matrices])
    orders = {"perm_x1": of_x, "perm_x2": of_weight, "perm_y": of_out}
    found = npu().npu_transpose_batchmatmul(*put(x, weight), **orders)
    assert_near(found, torch.stack([one.float() @ other.float() for one, other in matrices], 1))


@pytest.mark.parametrize("shape", [(1, 8), (5, 16), (2, 3, 8)])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE)
@covers("_C_ascend::npu_add_rms_norm_bias")
def test_a_sum_is_normed_and_biased(standin: StandIn, dtype: torch.dtype, biased: bool, shape: tuple[int, ...]) -> None:
    generator = make_generator(len(shape))
    x, residual = (draw(generator, *shape, dtype=dtype) for _ in range(2))
    gamma, beta = (draw(generator, shape[-1], dtype=dtype) for _ in range(2))
    y, deviations, total = torch.ops._C_ascend.npu_add_rms_norm_bias(
        *put(x, residual, gamma), beta.npu() if biased else None, 1e-3
    )
    assert_equal(total, x + residual)
    expected = F.rms_norm((x + residual).float(), shape[-1:], gamma.float(), 1e-3) + biased * beta.float()
    assert y.dtype == dtype
    assert_near(y, expected)
    rows = [float(1 / np.sqrt(np.mean(row**2) + 1e-3)) for row in (x + residual).double().flatten(0, -2).numpy()]
    assert_near(deviations, torch.tensor(rows).view(*shape[:-1], 1))


@pytest.mark.parametrize("dtype", TOLERANCE)
@covers("_C_ascend::npu_gemma_rms_norm")
def test_rows_are_normed_by_offsets_from_one(standin: StandIn, dtype: torch.dtype) -> None:
    generator = make_generator(0)
    x, gamma = draw(generator, 3, 8, dtype=dtype), draw(generator, 8, dtype=dtype)
    y, deviations = torch.ops._C_ascend.npu_gemma_rms_norm(*put(x, gamma), 1e-3)
    assert_near(y, F.rms_norm(x.float(), (8,), 1 + gamma.float(), 1e-3))
    assert_near(deviations[..., 0], torch.rsqrt(x.float().square().mean(-1) + 1e-3))


@pytest.mark.parametrize("dtype", TOLERANCE)
@covers("npu::npu_clipped_swiglu")
def test_halves_are_limited_and_gated(standin: StandIn, dtype: torch.dtype) -> None:
    """As OpenAI's gpt-oss does, but by halves."""
    x = 3 * draw(make_generator(0), 5, 16, dtype=dtype)
    found = npu().npu_clipped_swiglu(x.npu(), alpha=1.7, limit=2.0, bias=0.5, interleaved=False)
    gate, up = x.float().chunk(2, -1)
    gate = torch.minimum(gate, torch.tensor(2.0))
    assert found.dtype == dtype
    assert_near(found, gate / (1 + torch.exp(-1.7 * gate)) * (up.clip(-2, 2) + 0.5))


@pytest.mark.parametrize("alpha", [1, 2.5])
@pytest.mark.parametrize("dtype", TOLERANCE)
@covers("aten::_foreach_add.List")
def test_pairs_are_added(standin: StandIn, dtype: torch.dtype, alpha: float) -> None:
    generator, shapes = make_generator(0), [(3,), (2, 4), (0, 2)]
    ones, others = ([draw(generator, *shape, dtype=dtype) for shape in shapes] for _ in range(2))
    found = torch._foreach_add(put(*ones), put(*others), alpha=alpha)
    for one, other, each in zip(ones, others, found, strict=True):
        assert_near(each, one.float() + alpha * other.float())


@pytest.mark.parametrize("x", [[5, -300, 128, 0], []])
@covers("aten::div.Tensor_mode", "aten::div.out_mode", "aten::repeat_interleave.self_int")
def test_numbers_are_divided_and_repeated(standin: StandIn, x: list[int]) -> None:
    there = torch.tensor(x, dtype=torch.int32).npu()
    found = torch.div(there, 128, rounding_mode="floor")
    assert (found.dtype, found.tolist()) == (torch.int32, [number // 128 for number in x])
    out = torch.full_like(there, -1)
    assert torch.div(there, 128, rounding_mode="floor", out=out).data_ptr() == out.data_ptr()
    assert out.tolist() == [number // 128 for number in x]
    rows = torch.tensor([x, x], dtype=torch.int32)
    assert_equal(rows.npu().repeat_interleave(2, dim=-1), rows.repeat_interleave(2, dim=-1))
    assert there.repeat_interleave(2).tolist() == [number for number in x for _ in range(2)]


@pytest.mark.parametrize("x", [[5, -300, 128, 5, 0], []])
@covers("aten::searchsorted.Tensor", "aten::_unique2")
def test_numbers_are_looked_up_and_ordered(standin: StandIn, x: list[int]) -> None:
    there, edges = torch.tensor(x, dtype=torch.int32).npu(), torch.tensor([0, 5, 5, 128], dtype=torch.int32).npu()
    assert torch.searchsorted(edges, there, right=True).tolist() == [sum(e <= n for e in (0, 5, 5, 128)) for n in x]
    assert torch.searchsorted(edges, there).tolist() == [sum(e < n for e in (0, 5, 5, 128)) for n in x]
    values, inverse = there.view(1, -1).unique(return_inverse=True)
    assert (values.dtype, values.tolist()) == (torch.int32, sorted({*x}))
    assert inverse.tolist() == [[sorted({*x}).index(number) for number in x]]


@pytest.mark.parametrize("number", [2, 29])
@covers("npu::npu_format_cast")
def test_another_format_has_the_same_values(standin: StandIn, number: int) -> None:
    for x in (draw(make_generator(0), 4, 6), draw(make_generator(1), 4, 6).T):
        assert_equal(npu().npu_format_cast(x.npu(), number), x)


@settings(max_examples=scale(40))
@given(
    seed=SEEDS,
    requests=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 6)), max_size=4),
    padding=st.integers(0, 3),
    block_size=st.sampled_from([1, 4, 128]),
)
def test_each_token_finds_its_slot(
    standin: StandIn, seed: int, requests: list[tuple[int, int]], padding: int, block_size: int
) -> None:
    tokens = sum(count for _, count in requests)
    table = make_table(make_generator(seed), [first + count for first, count in requests] or [1], block_size)
    positions = [position for first, count in requests for position in range(first, first + count)]
    slots = torch.full((tokens + padding + 2,), ABSENT).int().npu()
    get_slots(requests, positions, table, slots, padding, block_size)
    owners = [request for request, (_, count) in enumerate(requests) for _ in range(count)]
    expected = [
        int(table[request, position // block_size]) * block_size + position % block_size
        for request, position in zip(owners, positions, strict=True)
    ]
    assert slots.tolist() == [*expected, *[-1] * padding, int(ABSENT), int(ABSENT)]
