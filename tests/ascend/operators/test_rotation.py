"""Rotary embedding, against that of transformers' models."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from standin_ascend import triton_kernels
from standin_ascend.triton_kernels import TritonKernel

from tests.standin.cann.cann import StandIn
from tests.support.ascend.operators.angles import make_angles, rotate_side_by_side
from tests.support.ascend.operators.checks import (
    ANY_FORMAT,
    HALF,
    TOLERANCE,
    assert_equal,
    assert_near,
    covers,
    draw,
    make_generator,
    npu,
    put,
)

pytestmark = ANY_FORMAT


@pytest.mark.parametrize("shape", [(1, 1, 1, 2), (5, 4, 1, 8), (3, 2, 1, 64)])
@pytest.mark.parametrize("dtype", TOLERANCE)
@covers("npu::npu_interleave_rope")
def test_pairs_side_by_side_rotate_as_in_deepseek(
    standin: StandIn, dtype: torch.dtype, shape: tuple[int, int, int, int]
) -> None:
    generator = make_generator(shape[0])
    cos, sin = make_angles(generator, shape[0], shape[-1], dtype)
    whole = draw(generator, *shape[:-1], shape[-1] + 3, dtype=dtype)  # of which a part is rotated
    x = whole[..., 3:]
    found = npu().npu_interleave_rope(whole.npu()[..., 3:], *put(cos, sin))
    assert found.dtype == dtype
    assert_near(found, rotate_side_by_side(x.float(), cos, sin))


@pytest.mark.parametrize("shape", [(1, 1, 1, 2), (1, 5, 4, 8), (2, 3, 2, 64)])
@pytest.mark.parametrize("dtype", TOLERANCE)
@covers("npu::npu_rotary_mul")
def test_pairs_in_two_halves_rotate_as_in_llama(
    standin: StandIn, dtype: torch.dtype, shape: tuple[int, int, int, int]
) -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    generator = make_generator(shape[1])
    x = draw(generator, *shape, dtype=dtype)
    cos, sin = (part.transpose(0, 1) for part in make_angles(generator, shape[1], shape[-1], dtype))
    found = npu().npu_rotary_mul(*put(x, cos, sin))
    halves = (part[:, :, 0].expand(shape[0], -1, -1).float() for part in (cos, sin))
    expected, _ = apply_rotary_pos_emb(x.float(), x.float(), *halves, unsqueeze_dim=2)
    assert_near(found, expected)


@pytest.mark.parametrize(("heads", "size", "rotated"), [(1, 2, 2), (4, 8, 8), (2, 16, 12)])
@pytest.mark.parametrize("dtype", TOLERANCE)
@covers("npu::npu_mrope")
def test_queries_and_keys_rotate_by_rows_of_a_cache_as_in_llama(
    standin: StandIn, dtype: torch.dtype, heads: int, size: int, rotated: int
) -> None:
    """Where the cache is narrower than a head, the rest of the head stays."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    generator, tokens = make_generator(size), 5
    cos, sin = (part[:, 0, 0] for part in make_angles(generator, 9, rotated, dtype))
    positions = torch.randperm(9, generator=generator)[:tokens]
    query, key = draw(generator, tokens, heads * size, dtype=dtype), draw(generator, tokens, size, dtype=dtype)
    cache = torch.cat([cos[:, : rotated // 2], sin[:, : rotated // 2]], -1)
    found = npu().npu_mrope(*put(positions, query, key, cache), size, mrope_section=[0, 0, 0])
    for part, out in zip((query, key), found, strict=True):
        each = part.float().unflatten(-1, (-1, size))
        turned, _ = apply_rotary_pos_emb(
            *[each[None, ..., :rotated]] * 2, *(table[positions].float()[None] for table in (cos, sin)), unsqueeze_dim=2
        )
        expected = torch.cat([turned[0], each[..., rotated:]], -1).flatten(1)
        assert out.dtype == dtype
        assert_near(out, expected)


@pytest.mark.parametrize(("size", "rotated"), [(8, 8), (16, 8)])
@pytest.mark.parametrize("dtype", TOLERANCE)
@covers("vllm::qkv_rmsnorm_rope", "npu::npu_mrope")
def test_queries_and_keys_are_normed_and_rotated_by_rows_of_a_cache(
    standin: StandIn, dtype: torch.dtype, size: int, rotated: int
) -> None:
    generator, tokens = make_generator(size), 5
    qkv = draw(generator, tokens, (4 + 2 + 2) * size, dtype=dtype)
    weights = [draw(generator, size, dtype=dtype) for _ in range(2)]
    positions = torch.randperm(9, generator=generator)[:tokens]
    angles = torch.rand(9, rotated // 2, generator=generator) * 6
    cache = torch.cat([angles.cos(), angles.sin()], -1).to(dtype)
    *found, value = torch.ops.vllm.qkv_rmsnorm_rope(
        *put(qkv, cache, positions, *weights), 4 * size, 2 * size, size, 1e-3
    )
    query, key, expected_value = qkv.split([4 * size, 2 * size, 2 * size], -1)
    normed = [
        F.rms_norm(part.unflatten(-1, (-1, size)).float(), (size,), weight.float(), 1e-3).flatten(1)
        for part, weight in zip((query, key), weights, strict=True)
    ]
    expected = npu().npu_mrope(*put(positions, *normed, cache.float()), size, mrope_section=[0, 0, 0])
    for each, out in zip(expected, found, strict=True):
        assert out.dtype == dtype
        assert_near(out, each.cpu())
    assert_equal(value, expected_value)


SECTIONS = {"apart": ((2, 1, 1), False), "in turns": ((2, 1, 1), True), "in turns, more": ((4, 2, 2), True)}


@pytest.mark.parametrize(("sections", "in_turns"), SECTIONS.values(), ids=SECTIONS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("kept", "gated"), [(0, False), (6, False), (0, True), (6, True)])
@covers("vllm::triton_split_qkv_rmsnorm_mrope")
def test_queries_and_keys_are_normed_and_rotated_by_three_positions(
    standin: StandIn, dtype: torch.dtype, sections: tuple[int, int, int], in_turns: bool, kept: int, gated: bool
) -> None:
    """The last *kept* values of a head are not rotated; gates come after the queries of each head."""
    generator, tokens, heads, shared, rotated = make_generator(sum(sections)), 3, 4, 2, 2 * sum(sections)
    size = rotated + kept
    queries = draw(generator, tokens, heads, size * (1 + gated), dtype=dtype)
    keys = draw(generator, tokens, 2 * shared * size, dtype=dtype)
    weights = [draw(generator, size, dtype=dtype) for _ in range(2)]
    angles = torch.rand(3, tokens, rotated // 2, generator=generator) * 6  # by time, height and width
    *found, value, gates = torch.ops.vllm.triton_split_qkv_rmsnorm_mrope(
        *put(
            torch.cat([queries.flatten(1), keys], -1), *weights, torch.cat([angles.cos(), angles.sin()], -1).to(dtype)
        ),
        num_q_heads=heads,
        num_kv_heads=shared,
        head_size=size,
        eps=1e-3,
        mrope_section=list(sections),
        is_interleaved=in_turns,
        rope_dim=rotated,
        has_gate=gated,
    )
    apart = [axis for axis, count in enumerate(sections) for _ in range(count)]
    turns = [pair % 3 if pair < 3 * sections[pair % 3] else 0 for pair in range(rotated // 2)]
    axes = turns if in_turns else apart
    key, expected_value = (part.unflatten(-1, (-1, size)) for part in keys.chunk(2, -1))
    for each, weight, out in zip((queries[..., :size], key), weights, found, strict=True):
        x = F.rms_norm(each.float(), (size,), weight.float(), 1e-3)
        expected = x.clone()
        for pair, axis in enumerate(axes):
            turned = torch.polar(torch.ones(tokens), angles[axis, :, pair])[:, None]
            product = torch.complex(x[..., pair], x[..., pair + rotated // 2]) * turned
            expected[..., pair], expected[..., pair + rotated // 2] = product.real, product.imag
        assert_near(out, expected.flatten(1), HALF if dtype == HALF else None)
    assert_equal(value, expected_value.flatten(1))
    assert_equal(gates, queries[..., size:].flatten(1))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("ranks", [1, 2])
def test_heads_of_all_ranks_are_normed_together_as_in_minimax(standin: StandIn, dtype: torch.dtype, ranks: int) -> None:
    """Ranks add up means of squares; then heads are normed as those of one rank would be, and rotated in part."""
    generator, tokens, heads, shared, size, rotated = make_generator(ranks), 3, 4, 2, 8, 4
    rows = [draw(generator, tokens, (heads + 2 * shared) * size, dtype=dtype) for _ in range(ranks)]
    widths = [heads * size, shared * size, shared * size]
    weights = [[draw(generator, width, dtype=dtype) for width in widths[:2]] for _ in range(ranks)]
    cos, sin = (part[:, 0, 0] for part in make_angles(generator, tokens, rotated, dtype))
    split = TritonKernel("split", triton_kernels.split_and_square)[(1,)]
    found, squares = [], []
    for row in rows:
        parts = [torch.empty(tokens, width, dtype=dtype).npu() for width in widths]
        squares.append(torch.empty(tokens, 2).npu())
        split(row.npu(), *parts, squares[-1], tokens, *widths[:2])
        found.append(parts)
    total = torch.stack([each.cpu() for each in squares]).sum(0).npu()
    norm = TritonKernel("norm", triton_kernels.norm_and_rotate)[(1,)]
    for (q, k, _), own in zip(found, weights, strict=True):
        sizes = tokens, *widths[:2], heads, shared, size, rotated, rotated // 2
        norm(q, k, *put(cos, sin), rotated, *put(*own), total, 1e-3, 1 / ranks, *sizes)
    plain = [row.float().split(widths, -1) for row in rows]
    for part in range(2):
        whole = torch.cat([each[part] for each in plain], -1)
        normed = F.rms_norm(whole, whole.shape[-1:], torch.cat([own[part].float() for own in weights]), 1e-3)
        by_head = normed.unflatten(-1, (-1, size))
        angles = (table[:, None].float() for table in (cos, sin))
        turned = rotate_in_halves(by_head[..., :rotated], *angles)
        expected = torch.cat([turned, by_head[..., rotated:]], -1).flatten(1)
        assert_near(torch.cat([parts[part].cpu() for parts in found], -1), expected, HALF if dtype == HALF else None)
    for parts, each in zip(found, plain, strict=True):
        assert_equal(parts[2], each[2].to(dtype))


def rotate_in_halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate pairs of which one is in each half [tokens, heads, size], as complex numbers."""
    first, second = x.chunk(2, -1)
    product = torch.complex(first, second) * torch.complex(cos.chunk(2, -1)[0], sin.chunk(2, -1)[0])
    return torch.cat([product.real, product.imag], -1)
