"""Caches in int8, against the same on what their bytes stand for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.standin.cann.cann import StandIn
from tests.support.ascend.operators.attention import attend
from tests.support.ascend.operators.blocks import cut_into_blocks
from tests.support.ascend.operators.byte_caches import (
    ROPE,
    attend_to_bytes,
    choose_keys,
    find_runs,
    pack_row,
    pack_rows,
)
from tests.support.ascend.operators.cases import CASES
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
from tests.support.ascend.operators.quantized import assert_quantized
from tests.support.ascend.operators.sparse import prepare
from tests.support.ascend.operators.sparse_requests import ABSENT_KEY, REQUESTS, make_requests
from tests.support.profiles import scale

pytestmark = ANY_FORMAT

BATCHES: dict[str, st.SearchStrategy[Any]] = {
    "seed": SEEDS,
    "requests": REQUESTS,
    "heads": st.integers(1, 4),
    "count": st.sampled_from([1, 3, 32]),  # of chosen keys
}


@settings(max_examples=scale(40))
@given(seed=SEEDS, tokens=st.integers(0, 5), tiles=st.integers(1, 3), dtype=FLOATS)
@covers("npu::npu_dynamic_block_quant")
def test_each_tile_is_quantized_by_its_largest_value(
    standin: StandIn, seed: int, tokens: int, tiles: int, dtype: torch.dtype
) -> None:
    x = draw(make_generator(seed), tokens, 1, tiles * 4, dtype=dtype)
    options = {"dst_type": torch.int8, "row_block_size": 1, "col_block_size": 4}
    found, scales = npu().npu_dynamic_block_quant(x.npu(), **options)
    assert scales.shape == (tokens, 1, tiles)
    assert_quantized(found.unflatten(-1, (tiles, 4)), scales, x.float().unflatten(-1, (tiles, 4)))


@settings(max_examples=scale(40))
@given(**BATCHES)
@covers("_C_ascend::npu_kv_quant_sparse_flash_attention_vllm")
def test_queries_attend_to_what_bytes_stand_for(
    standin: StandIn, seed: int, requests: list[tuple[int, int]], heads: int, count: int
) -> None:
    generator = make_generator(seed)
    batch = make_requests(generator, requests, 4)
    tokens = sum(batch.queries)
    query = draw(generator, tokens, heads, 8 + ROPE)
    latents, ropes, rows = zip(*(pack_rows(generator, length) for length in batch.keys), strict=True)
    chosen = torch.full((tokens, 1, count), ABSENT_KEY, dtype=torch.int32)
    for row, (request, _) in zip(chosen, batch.find_seen(), strict=True):
        some = torch.randperm(batch.keys[request], generator=generator)[:count].int()
        row[0, : len(some)] = some
    cache = torch.zeros(int(batch.table.max()) + 1, 4, 1, rows[0].shape[-1], dtype=torch.int8)
    for request, blocks in zip(rows, batch.table, strict=True):
        for position, token in enumerate(request):
            cache[blocks[position // 4], position % 4] = token
    tensors = put(query, cache, chosen, *batch.lengths, batch.table)
    out, *sums = attend_to_bytes(*tensors, return_softmax_lse=True)
    assert_equal(attend_to_bytes(*tensors)[0], out)
    expected, logarithms = torch.zeros(tokens, heads, 8), torch.full((tokens, heads), -torch.inf)
    for number, (request, seen) in enumerate(batch.find_seen()):
        places = [place for place in chosen[number, 0].tolist() if 0 <= place < seen]
        if places:
            value = latents[request][places]
            key = torch.cat([value, ropes[request][places]], -1)
            found, logarithm = attend(query[number][None], key, value, 0.2)
            expected[number], logarithms[number] = found[0], logarithm[0]
    assert out.dtype == HALF
    assert_near(out, expected)
    assert_near((sums[0] + sums[1].log())[0], logarithms)


@settings(max_examples=scale(40))
@given(**BATCHES)
@covers("_C_ascend::npu_lightning_indexer_quant")
def test_the_keys_with_the_largest_scaled_scores_are_chosen(
    standin: StandIn, seed: int, requests: list[tuple[int, int]], heads: int, count: int
) -> None:
    generator = make_generator(seed)
    batch = make_requests(generator, requests, 4)
    tokens = sum(batch.queries)
    query = torch.randint(-127, 128, (tokens, heads, 8), generator=generator).to(torch.int8)
    keys = [torch.randint(-127, 128, (length, 1, 8), generator=generator).float() for length in batch.keys]
    key_scales = [torch.rand(length, 1, generator=generator).half() + 0.1 for length in batch.keys]
    weights = draw(generator, tokens, heads, dtype=torch.float16)
    scales = torch.rand(tokens, heads, generator=generator).half() + 0.1
    cache = cut_into_blocks(keys, batch.table, 4).nan_to_num(99).to(torch.int8)
    caches = put(query, cache, weights, scales, cut_into_blocks(key_scales, batch.table, 4))
    found = choose_keys(*caches, *put(*batch.lengths, batch.table), sparse_count=count)
    assert (found.shape, found.dtype) == ((tokens, 1, count), torch.int32)
    for number, (request, seen) in enumerate(batch.find_seen()):
        row = found.cpu()[number, 0]
        plain = keys[request][:seen, 0].double() * key_scales[request][:seen].double()
        scores = torch.relu(plain @ (query[number].double() * scales[number].double()[:, None]).T)
        scores = scores @ weights[number].double()
        chosen = row[: min(seen, count)].long()
        assert len(set(chosen.tolist())) == len(chosen)
        assert (chosen >= 0).all()
        assert (row[len(chosen) :] == ABSENT_KEY).all()
        torch.testing.assert_close(scores[chosen], scores.topk(len(chosen)).values, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("slots", "runs"),
    [
        ([4, 5, 6, 7, 8, 9], [(4, 0, 4), (2, 4, 8)]),  # a block ends
        ([1, 2, -1, 3, 4], [(2, 0, 1), (1, 3, 3), (1, 4, 4)]),
        ([9, 0, 2, 1], [(1, 0, 9), (1, 1, 0), (1, 2, 2), (1, 3, 1)]),
        ([-1, -1], []),
    ],
)
@covers("_C_ascend::store_kv_block_metadata", "_C_ascend::store_kv_block")
def test_keys_are_stored_run_by_run(standin: StandIn, slots: list[int], runs: Sequence[tuple[int, ...]]) -> None:
    places = torch.tensor(slots, dtype=torch.int32)
    found = find_runs(*put(places, *(torch.full_like(places, 77) for _ in range(3))))
    wanted = torch.zeros(len(slots), 3, dtype=torch.int32)
    wanted[: len(runs)] = torch.tensor(runs).view(-1, 3)
    assert_equal(found, wanted.T)
    rows, cache = draw(make_generator(1), len(slots), 1, 3), torch.full((3, 4, 1, 3), ABSENT, dtype=HALF)
    there = cache.npu()
    torch.ops._C_ascend.store_kv_block(rows.npu(), there, *found, 4)
    for row, slot in zip(rows, slots, strict=True):
        if slot >= 0:
            cache[slot // 4, slot % 4] = row
    assert_equal(there, cache)


@pytest.mark.parametrize("clip", [1.0, 0.5])
@covers("npu::npu_mla_prolog_v3")
def test_the_prolog_writes_to_a_cache_in_int8_what_it_writes_to_others(standin: StandIn, clip: float) -> None:
    (case,) = (case for case in CASES if case.operator == "npu::npu_mla_prolog_v3")
    *inputs, latents, ropes = put(*case.make(make_generator(3)))
    query, rope, *_ = prepare(*inputs, latents, ropes)
    cache, empty = torch.full((2, 4, 1, 4 + 2 * 4 + 4), 77, dtype=torch.int8).npu(), ropes.new_empty(0)
    modes = {"kv_cache_quant_mode": 3, "ckvkr_repo_mode": 1, "quant_scale_repo_mode": 1, "tile_size": 4}
    alike = prepare(*inputs, cache, empty, k_nope_clip_alpha=torch.tensor([clip]).npu(), **modes)
    assert_equal(alike[:2], (query, rope))
    slots = set(inputs[-1].tolist())
    caches = zip(cache.cpu().flatten(0, 2), latents.cpu().flatten(0, 2), ropes.cpu().flatten(0, 2), strict=True)
    for slot, (row, latent, own_rope) in enumerate(caches):
        if slot not in slots:
            assert (row == 77).all()
            continue
        expected = pack_row(latent.tolist(), own_rope, 4, clip)
        assert (row[:4].int() - expected[:4].int()).abs().max() <= 1  # those were rounded to bfloat16 before
        assert_equal(row[4:12], expected[4:12])
        assert_near(row[12:].view(torch.float32), expected[12:].view(torch.float32), HALF)
