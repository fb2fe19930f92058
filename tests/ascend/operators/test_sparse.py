"""Sparse attention, against torch's own attention to the chosen keys; what prepares it, against transformers' parts."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.standin.cann.cann import StandIn
from tests.support.ascend.operators.angles import make_angles, rotate_side_by_side
from tests.support.ascend.operators.attention import attend
from tests.support.ascend.operators.blocks import cut_into_blocks
from tests.support.ascend.operators.checks import (
    ABSENT,
    ANY_FORMAT,
    FLOATS,
    HALF,
    SEEDS,
    assert_equal,
    assert_near,
    covers,
    draw,
    make_generator,
    npu,
    put,
)
from tests.support.ascend.operators.sparse_requests import ABSENT_KEY, REQUESTS, make_requests
from tests.support.profiles import scale

pytestmark = ANY_FORMAT

PAGED: dict[str, Any] = {"layout_query": "TND", "sparse_mode": 3}
BATCHES: dict[str, st.SearchStrategy[Any]] = {
    "seed": SEEDS,
    "requests": REQUESTS,
    "heads": st.integers(1, 4),
    "count": st.sampled_from([1, 3, 32]),  # of chosen keys
    "padding": st.integers(0, 2),
    "dtype": FLOATS,
}


@settings(max_examples=scale(40))
@given(**BATCHES)
@covers("npu::npu_lightning_indexer")
def test_the_keys_with_the_largest_scores_are_chosen(
    standin: StandIn,
    seed: int,
    requests: list[tuple[int, int]],
    heads: int,
    count: int,
    padding: int,
    dtype: torch.dtype,
) -> None:
    generator = make_generator(seed)
    batch = make_requests(generator, requests, 4)
    tokens = sum(batch.queries)
    query, weights = draw(generator, tokens + padding, heads, 8, dtype=dtype), draw(generator, tokens + padding, heads)
    keys = [draw(generator, length, 1, 8, dtype=dtype) for length in batch.keys]
    found, _ = npu().npu_lightning_indexer(
        *put(query, cut_into_blocks(keys, batch.table, 4), weights.to(dtype)),
        **dict(zip(("actual_seq_lengths_query", "actual_seq_lengths_key"), put(*batch.lengths), strict=True)),
        block_table=batch.table.npu(),
        layout_key="PA_BSND",
        sparse_count=count,
        **PAGED,
    )
    assert (found.shape, found.dtype) == ((tokens + padding, 1, count), torch.int32)
    rows = found.cpu()[:, 0]
    assert (rows[tokens:] == ABSENT_KEY).all()
    for row, one, weight, (request, seen) in zip(rows, query, weights.to(dtype), batch.find_seen(), strict=False):
        products = torch.relu(keys[request][:seen, 0].double() @ one.double().T)
        scores = products @ weight.double()
        chosen = row[: min(seen, count)].long()
        assert len(set(chosen.tolist())) == len(chosen)
        assert (chosen >= 0).all()
        assert (row[len(chosen) :] == ABSENT_KEY).all()
        torch.testing.assert_close(scores[chosen], scores.topk(len(chosen)).values, rtol=1e-6, atol=1e-6)


@settings(max_examples=scale(40))
@given(**BATCHES, is_causal=st.booleans(), is_rotated=st.booleans())
@covers("_C_ascend::npu_sparse_flash_attention")
def test_queries_attend_to_the_keys_that_were_chosen(
    standin: StandIn,
    seed: int,
    requests: list[tuple[int, int]],
    heads: int,
    count: int,
    padding: int,
    dtype: torch.dtype,
    is_causal: bool,
    is_rotated: bool,
) -> None:
    """Of those that come after the query there may be some among the chosen ones: with a mask it does not see them."""
    generator = make_generator(seed)
    batch = make_requests(generator, requests, 4)
    tokens = sum(batch.queries)
    sizes = 16, 8 if is_rotated else 0
    query, rope = (draw(generator, tokens + padding, heads, size, dtype=dtype) for size in sizes)
    latents, ropes = ([draw(generator, length, 1, size, dtype=dtype) for length in batch.keys] for size in sizes)
    chosen = torch.full((tokens + padding, 1, count), ABSENT_KEY, dtype=torch.int32)
    for row, (request, _) in zip(chosen, batch.find_seen(), strict=False):
        some = torch.randperm(batch.keys[request], generator=generator)[:count].int()
        row[0, : len(some)] = some
    latent_cache, rope_cache = put(*(cut_into_blocks(part, batch.table, 4) for part in (latents, ropes)))
    out, *sums = torch.ops._C_ascend.npu_sparse_flash_attention(
        query=query.npu(),
        key=latent_cache,
        value=latent_cache,
        sparse_indices=chosen.npu(),
        scale_value=0.2,
        sparse_block_size=1,
        block_table=batch.table.npu(),
        **dict(zip(("actual_seq_lengths_query", "actual_seq_lengths_kv"), put(*batch.lengths), strict=True)),
        query_rope=rope.npu() if is_rotated else None,
        key_rope=rope_cache if is_rotated else None,
        layout_kv="PA_BSND",
        attention_mode=2,
        **{**PAGED, "sparse_mode": 3 if is_causal else 0},
        return_softmax_lse=True,
    )
    expected = torch.zeros(tokens + padding, heads, 16)
    logarithms = torch.full((tokens + padding, heads), -torch.inf)
    for number, (request, seen) in enumerate(batch.find_seen()):
        seen = seen if is_causal else batch.keys[request]
        places = [place for place in chosen[number, 0].tolist() if 0 <= place < seen]
        if places:
            value = latents[request][places]
            key = torch.cat([value, ropes[request][places]], -1)
            one = torch.cat([query[number], rope[number]], -1)
            found, logarithm = attend(one[None], key, value, 0.2)
            expected[number], logarithms[number] = found[0], logarithm[0]
    assert out.dtype == dtype
    assert_near(out, expected)
    assert [(part.shape, part.dtype) for part in sums] == [((1, tokens + padding, heads), torch.float32)] * 2
    assert_near((sums[0] + sums[1].log())[0], logarithms)


@pytest.mark.parametrize("places", [[3], [4, 0, 7, 2], [-1, 6, -1]])
@pytest.mark.parametrize("number", [torch.int32, torch.int64])
@covers("npu::npu_scatter_nd_update_")
def test_rows_go_to_their_places(standin: StandIn, number: torch.dtype, places: list[int]) -> None:
    rows, updates = torch.full((8, 5), ABSENT, dtype=HALF), draw(make_generator(1), len(places), 5)
    there = rows.npu()
    given_back = npu().npu_scatter_nd_update_(
        there, torch.tensor(places, dtype=number).view(-1, 1).npu(), updates.npu()
    )
    for place, row in zip(places, updates, strict=True):
        if place >= 0:
            rows[place] = row
    assert_equal(there, rows)
    assert given_back.data_ptr() == there.data_ptr()


@pytest.mark.parametrize("slots", [[0], [5, 2, 11], [7, -1, 0, -1]])
@covers("npu::npu_mla_prolog_v3")
def test_queries_and_keys_are_made_of_bytes(standin: StandIn, slots: list[int]) -> None:
    """Hidden states of 32, latents of 24 and 16, two heads of 12 of which 8 are rotated; against float32."""
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RMSNorm

    generator, tokens = make_generator(len(slots)), len(slots)
    x, down, up, down_keys = (
        torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)
        for shape in ((tokens, 32), (32, 24), (24, 2 * 20), (32, 16 + 8))
    )
    of_x, of_down, of_up, of_keys = (
        torch.rand(shape, generator=generator) / 64 + 0.001 for shape in ((tokens, 1), (1, 24), (1, 40), (1, 24))
    )
    absorb, gamma, gamma_keys = draw(generator, 2, 12, 16), draw(generator, 24), draw(generator, 16)
    angles = make_angles(generator, tokens, 8, HALF)
    cos, sin = (table[:, 0, 0] for table in angles)
    caches = [torch.full((3, 4, 1, size), ABSENT, dtype=HALF) for size in (16, 8)]
    there = put(*caches)
    prepare = functools.partial(
        npu().npu_mla_prolog_v3,
        *put(x, down, up, absorb, down_keys, gamma, gamma_keys, sin, cos),
        *there,
        cache_index=torch.tensor(slots).npu(),
        dequant_scale_x=of_x.npu(),
        dequant_scale_w_dq=of_down.npu(),
        dequant_scale_w_uq_qr=of_up.npu(),
        dequant_scale_w_dkv_kr=of_keys.npu(),
        rmsnorm_epsilon_cq=1e-3,
        rmsnorm_epsilon_ckv=1e-3,
        cache_mode="PA_BSND",
        weight_quant_mode=2,
    )
    query, rope, _, latent, scales = prepare(query_norm_flag=True)
    without = prepare()
    assert_equal(without[:2], (query, rope))
    assert [part.numel() for part in without[2:]] == [0] * 3
    norm, key_norm = DeepseekV3RMSNorm(24, 1e-3), DeepseekV3RMSNorm(16, 1e-3)
    norm.weight.copy_(gamma)
    key_norm.weight.copy_(gamma_keys)
    plain = x.float() * of_x
    normed = norm(plain @ (down.float() * of_down))
    assert (latent.dtype, list(scales.shape)) == (torch.int8, [tokens, 1])
    assert ((latent.cpu() * scales.cpu() - normed).abs() <= scales.cpu() * 0.51).all()  # rounded to a byte
    heads = ((latent.cpu() * scales.cpu()) @ (up.float() * of_up)).unflatten(1, (2, 20)).to(HALF).float()
    assert_near(query, torch.einsum("thp,hpl->thl", heads[..., :12], absorb.float()))
    assert_near(rope, rotate_side_by_side(heads[:, :, None, 12:], *angles)[:, :, 0])
    keys = (plain @ (down_keys.float() * of_keys)).to(HALF).float()
    parts = key_norm(keys[:, :16]), rotate_side_by_side(keys[:, None, None, 16:], *angles)[:, 0, 0]
    for cache, part in zip(there, parts, strict=True):
        expected = torch.full((12, part.shape[1]), ABSENT)
        for slot, row in zip(slots, part, strict=True):
            if slot >= 0:
                expected[slot] = row
        assert_near(cache.flatten(0, 2), expected)
