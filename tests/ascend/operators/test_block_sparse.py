"""Sparse attention to blocks of keys (MiniMax-M3), against plain loops over queries, and its kernels of Triton."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from standin_ascend import block_sparse
from standin_ascend.triton_kernels import TritonKernel

from tests.standin.cann.cann import StandIn
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
    put,
)
from tests.support.ascend.operators.checks import draw as draw_tensor
from tests.support.ascend.operators.checks import make_generator as make
from tests.support.ascend.operators.sparse_requests import REQUESTS, make_requests
from tests.support.profiles import scale

pytestmark = ANY_FORMAT

BLOCK = 4
BATCHES: dict[str, st.SearchStrategy[Any]] = {"seed": SEEDS, "requests": REQUESTS, "dtype": FLOATS}
Requests = list[tuple[int, int]]


@settings(max_examples=scale(40))
@given(causal=st.booleans(), **BATCHES)
@covers("_C_ascend::npu_msa_index_score")
def test_blocks_are_rated_by_their_best_key(
    standin: StandIn, seed: int, requests: Requests, dtype: torch.dtype, causal: bool
) -> None:
    """Without a mask, a query is rated with all keys of its request."""
    generator = make(seed)
    batch = make_requests(generator, requests, BLOCK)
    query = draw_tensor(generator, sum(batch.queries), 3, 8, dtype=dtype)
    keys = [draw_tensor(generator, length, 1, 8, dtype=dtype) for length in batch.keys]
    edges = torch.tensor([0, *accumulate(batch.queries)], dtype=torch.int32)
    mask = torch.zeros(1, dtype=torch.int8).npu() if causal else None
    found = torch.ops._C_ascend.npu_msa_index_score(
        *put(query, cut_into_blocks(keys, batch.table, BLOCK), batch.table, batch.lengths[1] // BLOCK),
        atten_mask=mask,
        actual_seq_qlen=edges.npu(),
        actual_seq_klen=batch.lengths[1].npu(),
        sparse_mode=3 if causal else 0,
    )
    assert (found.dtype, found.shape[2] % 16, found.shape[2] >= batch.table.shape[1]) == (torch.float32, 0, True)
    expected = torch.full(found.shape, -torch.inf)
    for number, (request, seen) in enumerate(batch.find_seen()):
        products = query[number].double() @ keys[request][: seen if causal else None, 0].double().T
        for block, part in enumerate(products.split(BLOCK, -1)):
            if part.numel():
                expected[:, number, block] = part.amax(-1).float()
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-6, atol=1e-6)


@settings(max_examples=scale(40))
@given(heads=st.sampled_from([1, 2]), shared=st.sampled_from([1, 3]), count=st.sampled_from([1, 3]), **BATCHES)
@covers("_C_ascend::npu_sparse_attention_score")
def test_queries_attend_to_the_blocks_that_were_chosen(
    standin: StandIn, seed: int, requests: Requests, dtype: torch.dtype, heads: int, shared: int, count: int
) -> None:
    """Each head of keys has chosen its own; of a chosen block, keys that come after the query are not seen."""
    generator = make(seed)
    batch = make_requests(generator, requests, BLOCK)
    tokens = sum(batch.queries)
    query = draw_tensor(generator, tokens, heads * shared, 8, dtype=dtype)
    keys, values = ([draw_tensor(generator, each, heads, 8, dtype=dtype) for each in batch.keys] for _ in range(2))
    chosen = torch.full((heads, tokens, count), -1, dtype=torch.int32)
    for number, (request, _) in enumerate(batch.find_seen()):
        for head in range(heads):
            some = torch.randperm(-(-batch.keys[request] // BLOCK), generator=generator)[:count].int()
            chosen[head, number, : len(some)] = some
    counts = torch.randint(0, count + 1, chosen.shape[:2], generator=generator, dtype=torch.int32)
    caches = put(*(cut_into_blocks(part, batch.table, BLOCK) for part in (keys, values)))
    found = torch.ops._C_ascend.npu_sparse_attention_score(
        query.npu(),
        *caches,
        *put(chosen, batch.table),
        select_num_idx=counts.npu(),
        actual_seq_lengths=torch.tensor(batch.queries, dtype=torch.int32).npu(),
        actual_seq_lengths_kv=batch.lengths[1].npu(),
        num_key_value_heads=heads,
        scale_value=0.2,
        block_size=BLOCK,
        top_k=count,
        inner_precise=4,
    )
    expected = torch.zeros(tokens, heads * shared, 8)
    for number, (request, seen) in enumerate(batch.find_seen()):
        for head in range(heads):
            blocks = [block for block in chosen[head, number, : counts[head, number]].tolist() if block >= 0]
            places = [place for place in range(seen) if place // BLOCK in blocks]
            group = slice(head * shared, (head + 1) * shared)
            if places:
                parts = (part[request][places, head, None].expand(-1, shared, -1) for part in (keys, values))
                expected[number, group] = attend(query[number, None, group], *parts, 0.2)[0][0]
    assert found.dtype == dtype
    assert_near(found, expected)


@pytest.mark.parametrize("places", [[3], [4, 0, 7, 2], [-1, 6, -1]])
@covers("_C_ascend::npu_scatter_nd_update_sk")
def test_rows_go_to_their_places(standin: StandIn, places: list[int]) -> None:
    rows, updates = torch.full((8, 5), ABSENT, dtype=HALF), draw_tensor(make(1), len(places), 5)
    there = rows.npu()
    torch.ops._C_ascend.npu_scatter_nd_update_sk(there, torch.tensor(places).view(-1, 1).npu(), updates.npu())
    for place, row in zip(places, updates, strict=True):
        if place >= 0:
            rows[place] = row
    assert_equal(there, rows)


@pytest.mark.parametrize(("first", "nearest"), [(0, 1), (1, 2), (0, 0)])
def test_blocks_that_are_chosen_in_any_case_are_rated_best(standin: StandIn, first: int, nearest: int) -> None:
    """Two requests of three and two queries, with five keys and none before them; of the nearest ones, if both."""
    scores = draw_tensor(make(0), 2, 5, 16, dtype=torch.float32)
    found, edges, before = put(scores, *(torch.tensor(each, dtype=torch.int32) for each in ([0, 3, 5], [5, 0])))
    kernel = TritonKernel("prefer", block_sparse.prefer_blocks)[(1, 4)]
    kernel(found, edges, before, 2, first, nearest, 16, *scores.stride(), sparse_block_size=BLOCK, MAX_QUERY_LEN=3)
    for query, position in enumerate([5, 6, 7, 0, 1]):
        last = position // BLOCK
        for block in range(last + 1):
            if block < first:
                scores[:, query, block] = 1e30
            if block > last - nearest:
                scores[:, query, block] = 1e29
    assert_equal(found, scores)


def test_blocks_that_are_not_seen_are_dropped(standin: StandIn) -> None:
    chosen = torch.arange(3, dtype=torch.int32).expand(2, 5, 3).contiguous()
    found, edges, before = put(chosen, *(torch.tensor(each, dtype=torch.int32) for each in ([0, 3, 5], [5, 0])))
    kernel = TritonKernel("drop", block_sparse.drop_unseen_blocks)[(1, 4)]
    kernel(found, edges, before, 2, BLOCK, 3, *chosen.stride(), BLOCK_SIZE_Q=1)
    seen = torch.tensor([5, 6, 7, 0, 1]) // BLOCK + 1
    assert_equal(found, torch.where(chosen < seen[:, None], chosen, -1))
