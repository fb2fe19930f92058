"""Operators of quantized weights, against Python's integers: products are exact, and one row never changes another."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.standin.cann.cann import StandIn
from tests.support.ascend.operators.cases import draw_scales, make_int8
from tests.support.ascend.operators.checks import (
    ANY_FORMAT,
    COUNTS,
    CUMULATED,
    FLOATS,
    HALF,
    SEEDS,
    SIZES,
    assert_equal,
    assert_near,
    covers,
    draw,
    make_generator,
    npu,
    put,
)
from tests.support.ascend.operators.experts import Routing, make_routings
from tests.support.ascend.operators.quantized import assert_quantized
from tests.support.profiles import scale

pytestmark = ANY_FORMAT

GROUPS = st.lists(st.integers(0, 4), min_size=1, max_size=4)


def multiply(x: torch.Tensor, weight: torch.Tensor) -> list[list[int]]:
    """Multiply integers [rows, in] x [in, out] as Python does."""
    columns = weight.T.tolist()
    return [[sum(a * b for a, b in zip(row, column, strict=True)) for column in columns] for row in x.tolist()]


LIMITS = st.sampled_from([0.0, 0.5])


def activate(x: torch.Tensor, limit: float = 0.0) -> torch.Tensor:
    """Return SwiGLU of each row [rows, size]: its first half gates the second, both limited if there is a limit."""
    half, most = x.shape[1] // 2, limit or math.inf
    rows = [
        [
            min(gate, most) / (1 + math.exp(-min(gate, most))) * max(min(up, most), -most)
            for gate, up in zip(row[:half], row[half:], strict=True)
        ]
        for row in x.tolist()
    ]
    return torch.tensor(rows).view(len(x), half)


@settings(max_examples=scale(40))
@given(seed=SEEDS, tokens=st.integers(0, 5), size=SIZES, dtype=FLOATS, zeros=st.booleans())
@covers("npu::npu_dynamic_quant")
def test_each_row_is_quantized_by_its_largest_value(
    standin: StandIn, seed: int, tokens: int, size: int, dtype: torch.dtype, zeros: bool
) -> None:
    x = draw(make_generator(seed), tokens, 2, size, dtype=dtype) * (not zeros)
    assert_quantized(*npu().npu_dynamic_quant(x.npu(), dst_type=torch.int8), x.float())


@settings(max_examples=scale(40))
@given(seed=SEEDS, tokens=st.integers(0, 5), size=SIZES, shifted=st.booleans())
@covers("npu::npu_quantize")
def test_values_are_scaled_shifted_and_saturated(
    standin: StandIn, seed: int, tokens: int, size: int, shifted: bool
) -> None:
    generator = make_generator(seed)
    x, scales = draw(generator, tokens, size), draw(generator, size) * 100
    offsets = torch.randint(-9, 9, (size,), generator=generator).to(HALF) if shifted else None
    on_device = None if offsets is None else offsets.npu()
    found = npu().npu_quantize(x.npu(), scales.npu(), on_device, torch.qint8, -1, False)
    assert found.dtype == torch.int8
    added = [0.0] * size if offsets is None else offsets.tolist()
    for row, values in zip(found.tolist(), x.tolist(), strict=True):
        exact = [value * by + more for value, by, more in zip(values, scales.tolist(), added, strict=True)]
        assert row == pytest.approx([min(max(value, -128), 127) for value in exact], abs=0.501)


@settings(max_examples=scale(40))
@given(seed=SEEDS, tokens=st.integers(0, 5), size=SIZES, form=st.sampled_from(["static", "by token", "integers"]))
@covers("npu::npu_quant_matmul")
def test_integers_are_multiplied_exactly_and_scaled(
    standin: StandIn, seed: int, tokens: int, size: int, form: str
) -> None:
    generator = make_generator(seed)
    x, weight, by_column = make_int8(generator, tokens, size), make_int8(generator, size, 6), draw_scales(generator, 6)
    product = torch.tensor(multiply(x, weight)).view(tokens, 6)
    if form == "integers":
        found = npu().npu_quant_matmul(*put(x, weight, by_column), output_dtype=torch.int32)
        assert_equal(found, product.int())
    elif form == "static":
        bias = torch.randint(-1000, 1000, (6,), generator=generator, dtype=torch.int32)
        found = npu().npu_quant_matmul(*put(x, weight, by_column), bias=bias.npu(), output_dtype=HALF)
        assert_near(found, (product + bias) * by_column)
    else:
        by_row, bias = draw_scales(generator, tokens), draw(generator, 6)
        options = {"pertoken_scale": by_row.npu(), "bias": bias.npu(), "output_dtype": HALF}
        found = npu().npu_quant_matmul(*put(x, weight, by_column), **options)
        assert_near(found, product * by_column * by_row[:, None] + bias.float())


@settings(max_examples=scale(30))
@given(
    seed=SEEDS,
    counts=GROUPS,
    rest=st.integers(0, 2),
    listed=st.booleans(),
    count_type=st.sampled_from([CUMULATED, COUNTS]),
)
@covers("npu::npu_grouped_matmul")
def test_integers_of_each_expert_are_multiplied_by_its_matrix(
    standin: StandIn, seed: int, counts: list[int], rest: int, listed: bool, count_type: int
) -> None:
    generator, experts = make_generator(seed), len(counts)
    x, weight = make_int8(generator, sum(counts) + rest, 8), make_int8(generator, experts, 8, 6)
    by_column, by_row = draw_scales(generator, experts, 6), draw_scales(generator, len(x))
    groups = torch.tensor(counts) if count_type == COUNTS else torch.tensor(counts).cumsum(0)
    (found,) = npu().npu_grouped_matmul(
        x=put(x),
        weight=put(*weight) if listed else put(weight),
        scale=put(*by_column) if listed else put(by_column),
        per_token_scale=put(by_row),
        split_item=2,
        group_type=0,
        group_list_type=count_type,
        group_list=groups.npu(),
        output_dtype=HALF,
    )
    expected, first = torch.zeros(len(x), 6), 0
    for expert, count in enumerate(counts):
        rows = slice(first, first + count)
        product = torch.tensor(multiply(x[rows], weight[expert])).view(count, 6)
        expected[rows] = product * by_column[expert] * by_row[rows, None]
        first += count
    assert found.dtype == HALF
    assert_near(found, expected)


@settings(max_examples=scale(30))
@given(seed=SEEDS, counts=GROUPS, limit=LIMITS)
@covers(
    "_C_ascend::grouped_matmul_swiglu_quant_weight_nz",
    "_C_ascend::grouped_matmul_swiglu_quant_weight_nz_tensor_list",
    "npu::npu_grouped_matmul",
)
def test_the_fused_activation_is_that_of_its_parts(
    standin: StandIn, seed: int, counts: list[int], limit: float
) -> None:
    generator, experts = make_generator(seed), len(counts)
    x, weight = make_int8(generator, sum(counts), 8), make_int8(generator, experts, 8, 6)
    by_column, by_row = draw_scales(generator, experts, 6) / 1000, draw_scales(generator, len(x))
    ends = torch.tensor(counts).cumsum(0)
    inputs = put(x, weight, by_column, by_row, ends)
    found, scales, _ = torch.ops._C_ascend.grouped_matmul_swiglu_quant_weight_nz(*inputs, swiglu_limit=limit)
    (product,) = npu().npu_grouped_matmul(
        x=inputs[:1],
        weight=[inputs[1]],
        scale=[inputs[2]],
        per_token_scale=[inputs[3]],
        group_type=0,
        group_list=inputs[4],
        output_dtype=torch.float32,
    )
    assert_quantized(found, scales, activate(product, limit))
    lists = inputs[0], list(inputs[1]), list(inputs[2]), *inputs[3:]
    of_each, their_scales, _ = torch.ops._C_ascend.grouped_matmul_swiglu_quant_weight_nz_tensor_list(
        *lists, swiglu_limit=limit
    )
    assert torch.equal(of_each, found)
    assert torch.equal(their_scales, scales)


@settings(max_examples=scale(30))
@given(seed=SEEDS, counts=GROUPS, count_type=st.sampled_from([CUMULATED, COUNTS]), limit=LIMITS)
@covers("_C_ascend::grouped_matmul_swiglu_quant_v2", "npu::npu_grouped_matmul")
def test_matrices_of_four_bits_are_multiplied_as_if_they_had_eight(
    standin: StandIn, seed: int, counts: list[int], count_type: int, limit: float
) -> None:
    """Packed along the output, the first number in the lower bits; the assist adds what the kernel leaves out."""
    generator, experts = make_generator(seed), len(counts)
    x, weight = make_int8(generator, sum(counts), 8), torch.randint(-8, 8, (experts, 8, 8), generator=generator)
    by_column, by_row = draw_scales(generator, experts, 8) / 1000, draw_scales(generator, len(x))
    packed = ((weight[..., 1::2] << 4) | (weight[..., ::2] & 15)).to(torch.int8).view(torch.int32)
    bits, assist = by_column.view(torch.int32).long(), 8 * (weight * by_column[:, None]).sum(1)
    groups = torch.tensor(counts) if count_type == COUNTS else torch.tensor(counts).cumsum(0)
    owners = [expert for expert, count in enumerate(counts) for _ in range(count)]
    products = [multiply(row[None], weight[expert])[0] for row, expert in zip(x, owners, strict=True)]
    columns = by_column[torch.tensor(owners, dtype=torch.long)]
    expected = torch.tensor(products).view(len(x), 8) * columns * by_row[:, None]
    (found,) = npu().npu_grouped_matmul(
        x=put(x),
        weight=put(packed),
        scale=put(bits[:, None]),
        bias=put(assist),
        per_token_scale=put(by_row),
        group_type=0,
        group_list=groups.npu(),
        group_list_type=count_type,
        output_dtype=HALF,
    )
    assert_near(found, expected, HALF)
    inputs = x.npu(), put(packed), put(bits), by_row.npu(), groups.npu()
    activated, scales = torch.ops._C_ascend.grouped_matmul_swiglu_quant_v2(
        *inputs, weight_assist_matrix=put(assist), group_list_type=count_type, swiglu_limit=limit
    )
    assert_quantized(activated, scales, activate(expected, limit))


@settings(max_examples=scale(30))
@given(seed=SEEDS, tokens=st.integers(0, 4), mode=st.sampled_from([0, 1]))
@covers("_C_ascend::npu_dequant_swiglu_quant")
def test_a_product_of_integers_is_scaled_and_activated(standin: StandIn, seed: int, tokens: int, mode: int) -> None:
    generator = make_generator(seed)
    x, by_column = torch.randint(-999, 999, (tokens, 6), generator=generator), draw_scales(generator, 6) / 100
    by_row = draw_scales(generator, tokens)
    found, scales = torch.ops._C_ascend.npu_dequant_swiglu_quant(
        x.int().npu(), weight_scale=by_column.npu(), activation_scale=by_row.npu(), quant_mode=1, swiglu_mode=mode
    )
    assert_quantized(found, scales, activate(x * by_column * by_row[:, None]))


@settings(max_examples=scale(20))
@given(seed=SEEDS, tokens=st.integers(0, 4), limit=st.sampled_from([0.0, 1.5]))
@covers("_C_ascend::dequant_situ_quant")
def test_factors_of_an_activation_are_limited_softly(standin: StandIn, seed: int, tokens: int, limit: float) -> None:
    generator = make_generator(seed)
    x, by_column = torch.randint(-999, 999, (tokens, 6), generator=generator), draw_scales(generator, 6) / 100
    by_row = draw_scales(generator, tokens)
    scales_of = {"weight_scale": by_column.npu(), "activation_scale": by_row.npu()}
    found, scales = torch.ops._C_ascend.dequant_situ_quant(x.int().npu(), **scales_of, beta=4.0, linear_beta=limit)
    gate, up = (x * by_column * by_row[:, None]).double().chunk(2, -1)
    up = limit * (1 - 2 / (torch.exp(2 * up / limit) + 1)) if limit else up
    gate = 4 * (1 - 2 / (torch.exp(gate / 2) + 1)) / (1 + torch.exp(-gate))
    assert_quantized(found, scales, (gate * up).float())
    with pytest.raises(NotImplementedError, match="mode static"):
        torch.ops._C_ascend.dequant_situ_quant(x.int().npu(), **scales_of, quant_mode="static")


@pytest.mark.parametrize("limit", [0.0, 1.5])
@covers("_C_ascend::npu_dequant_swiglu_quant")
def test_factors_of_an_activation_are_limited_and_shifted(standin: StandIn, limit: float) -> None:
    generator = make_generator(0)
    x, by_column = torch.randint(-999, 999, (5, 16), generator=generator), draw_scales(generator, 16) / 200
    by_row = draw_scales(generator, 5)
    found, scales = torch.ops._C_ascend.npu_dequant_swiglu_quant(
        x.int().npu(),
        weight_scale=by_column.npu(),
        activation_scale=by_row.npu(),
        quant_mode=1,
        swiglu_mode=1,
        clamp_limit=limit,
        glu_alpha=1.7,
        glu_bias=1.0,
    )
    gate, up = (x * by_column * by_row[:, None]).chunk(2, -1)
    if limit:
        gate, up = torch.minimum(gate, torch.tensor(limit)), up.clip(-limit, limit)
    assert_quantized(found, scales, gate / (1 + torch.exp(-1.7 * gate)) * (up + 1))


@covers("_C_ascend::npu_dequant_swiglu_quant")
def test_a_product_is_scaled_by_the_group_of_each_row(standin: StandIn) -> None:
    generator, counts = make_generator(0), torch.tensor([2, 0, 3])
    x, by_column = torch.randint(-999, 999, (5, 6), generator=generator), draw_scales(generator, 18).view(3, 6) / 100
    by_row = draw_scales(generator, 5)
    found, scales = torch.ops._C_ascend.npu_dequant_swiglu_quant(
        x.int().npu(),
        weight_scale=by_column.npu(),
        activation_scale=by_row.npu(),
        group_index=counts.npu(),
        quant_mode=1,
    )
    of_rows = torch.stack([by_column[0]] * 2 + [by_column[2]] * 3)
    assert_quantized(found, scales, activate(x * of_rows * by_row[:, None]))


@settings(max_examples=scale(40))
@given(routing=make_routings())
@covers("npu::npu_moe_init_routing_v2", "npu::npu_dynamic_quant")
def test_rows_quantized_on_their_way_are_those_quantized_before(standin: StandIn, routing: Routing) -> None:
    """The same integers, and with each row the scale of its token."""
    options = {"expert_tokens_num_type": COUNTS, "active_expert_range": [routing.first, routing.last]}
    on_the_way = routing.call(quant_mode=1, **options)
    integers, scales = npu().npu_dynamic_quant(routing.x.npu())
    before = routing._replace(x=integers.cpu()).call(scale=scales, **options)
    sources = [number // routing.ids.shape[1] for _, number in routing.sort()]
    for rows, places, counts, row_scales in (on_the_way, before):
        assert_equal(rows[: len(sources)], integers.cpu()[sources])
        assert_equal(row_scales[: len(sources)], scales.cpu()[sources])
        assert_equal((places, counts), before[1:3])
