"""Attention, packed and to a cache that has blocks, against torch's own."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.standin.cann.cann import StandIn
from tests.support.ascend.operators.attention import attend, attend_each, make_packed
from tests.support.ascend.operators.blocks import cut_into_blocks, make_table
from tests.support.ascend.operators.checks import (
    ABSENT,
    ANY_FORMAT,
    CAUSAL,
    COUNTS,
    FLOATS,
    HALF,
    NO_MASK,
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
from tests.support.ascend.operators.decodes import make_decode
from tests.support.ascend.operators.experts import multiply_groups
from tests.support.profiles import scale

pytestmark = ANY_FORMAT


@settings(max_examples=scale(50))
@given(
    seed=SEEDS,
    lengths=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 12)), min_size=1, max_size=4),
    heads=st.integers(1, 4),
    sizes=st.tuples(SIZES, SIZES, st.sampled_from([0, 4])),
    causal=st.booleans(),
    padding=st.integers(0, 2),
    dtype=FLOATS,
)
@covers("npu::npu_fused_infer_attention_score")
def test_packed_sequences_attend_each_to_itself(
    standin: StandIn,
    seed: int,
    lengths: list[tuple[int, int]],
    heads: int,
    sizes: tuple[int, int, int],
    causal: bool,
    padding: int,
    dtype: torch.dtype,
) -> None:
    generator = make_generator(seed)
    batch = make_packed(generator, lengths, (heads, heads), sizes, dtype)
    query, key, value, query_rope, key_rope = map(torch.cat, batch)
    query, query_rope = (F.pad(part, (0, 0, 0, 0, 0, padding), value=torch.nan) for part in (query, query_rope))
    ropes = {"query_rope": query_rope.npu(), "key_rope": key_rope.npu()} if sizes[2] else {}
    out, sums = npu().npu_fused_infer_attention_score(
        *put(query, key, value),
        **ropes,
        num_heads=heads,
        num_key_value_heads=heads,
        input_layout="TND",
        atten_mask=torch.ones(2048, 2048, dtype=torch.bool).triu(1).npu() if causal else None,
        sparse_mode=CAUSAL if causal else NO_MASK,
        scale=0.3,
        softmax_lse_flag=True,
        actual_seq_lengths=list(accumulate(queries for queries, _ in lengths)),
        actual_seq_lengths_kv=list(accumulate(keys for _, keys in lengths)),
    )
    expected, expected_sums = attend_each(batch, 0.3, causal)
    assert out.dtype == dtype
    assert_near(out, F.pad(expected, (0, 0, 0, 0, 0, padding)))
    assert_near(sums[..., 0], F.pad(expected_sums, (0, 0, 0, padding), value=-torch.inf))


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [(4, 1), (4, 2), (3, 3)])
@covers("npu::npu_fused_infer_attention_score")
def test_heads_share_keys_that_are_packed_or_in_a_cache(
    standin: StandIn, heads: tuple[int, int], causal: bool, cached: bool
) -> None:
    generator, lengths = make_generator(7), [(3, 11), (1, 6), (5, 5), (4, 16)]
    batch = make_packed(generator, lengths, heads, (16, 16, 0), HALF)
    keys = [keys for _, keys in lengths]
    settings_of_keys: dict[str, Any] = {"actual_seq_lengths_kv": list(accumulate(keys))}
    key, value = torch.cat(batch.keys), torch.cat(batch.values)
    if cached:
        table = make_table(generator, keys, 8)
        key, value = (cut_into_blocks(part, table, 8).flatten(2) for part in (batch.keys, batch.values))
        # One request more than there are queries: padding, as graphs have it.
        settings_of_keys = {"actual_seq_lengths_kv": [*keys, 0], "block_table": table.npu(), "block_size": 8}
    out, sums = npu().npu_fused_infer_attention_score(
        *put(torch.cat(batch.queries), key, value),
        **settings_of_keys,
        num_heads=heads[0],
        num_key_value_heads=heads[1],
        input_layout="TND",
        atten_mask=torch.ones(2048, 2048, dtype=torch.bool).triu(1).npu() if causal else None,
        sparse_mode=CAUSAL if causal else NO_MASK,
        scale=0.25,
        softmax_lse_flag=True,
        actual_seq_lengths=list(accumulate(queries for queries, _ in lengths)),
    )
    expected, expected_sums = attend_each(batch, 0.25, causal)
    assert_near(out, expected)
    assert_near(sums[..., 0], expected_sums, HALF)


def test_a_row_has_the_same_bits_whatever_the_other_rows_are(standin: StandIn) -> None:
    """What makes a step that is split equal to an unsplit one."""
    generator = make_generator(3)
    tokens, lengths = 40, [23, 40]
    query, key, value = (draw(generator, tokens, 4, 16) for _ in range(3))

    def attend_to(first: int, last: int, ends: list[int]) -> torch.Tensor:
        out, _ = npu().npu_fused_infer_attention_score(
            *put(*(part[first:last] for part in (query, key, value))),
            num_heads=4,
            num_key_value_heads=4,
            input_layout="TND",
            sparse_mode=NO_MASK,
            actual_seq_lengths=ends,
            actual_seq_lengths_kv=ends,
        )
        return out

    together = attend_to(0, tokens, lengths)
    assert_equal(together, torch.cat([attend_to(0, 23, [23]), attend_to(23, 40, [17])]))
    x, weight = draw(generator, tokens, 16), draw(generator, 3, 16, 8)
    whole = multiply_groups(x, [weight], [10, 0, 30], COUNTS)
    parts = [
        multiply_groups(x[:4], [weight], [4, 0, 0], COUNTS),
        multiply_groups(x[4:], [weight], [6, 0, 30], COUNTS),
    ]
    assert_equal(whole, torch.cat(parts))


@settings(max_examples=scale(40))
@given(
    seed=SEEDS,
    lengths=st.lists(st.integers(0, 20), min_size=1, max_size=5),
    heads=st.integers(1, 4),
    queries=st.integers(1, 2),
    block_size=st.sampled_from([1, 4, 16]),
    dtype=FLOATS,
)
@covers(
    "npu::npu_fused_infer_attention_score_v2",
    "npu::npu_fused_infer_attention_score_v2.out",
    "npu::_npu_fused_infer_attention_score_v2_get_max_workspace",
)
def test_decodes_attend_to_the_blocks_that_their_table_names(
    standin: StandIn, seed: int, lengths: list[int], heads: int, queries: int, block_size: int, dtype: torch.dtype
) -> None:
    decode = make_decode(seed, lengths, heads, queries, block_size, dtype)
    expected = decode.expect()
    out, _ = decode.call(npu().npu_fused_infer_attention_score_v2)
    assert out.dtype == dtype
    assert_near(out, expected)
    workspace = decode.call(npu()._npu_fused_infer_attention_score_v2_get_max_workspace)
    there = torch.full(expected.shape, ABSENT, dtype=dtype).npu(), torch.empty(1).npu()
    given_back = decode.call(npu().npu_fused_infer_attention_score_v2.out, workspace=workspace, out=list(there))
    assert_equal(there[0], out)
    assert [tensor.data_ptr() for tensor in given_back] == [tensor.data_ptr() for tensor in there]


@settings(max_examples=scale(40))
@given(
    seed=SEEDS,
    requests=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 12)), min_size=1, max_size=5),
    heads=st.integers(1, 4),
    block_size=st.sampled_from([1, 4]),
    padding=st.integers(0, 2),
    dtype=FLOATS,
)
@covers("npu::npu_fused_infer_attention_score_v2")
def test_drafts_attend_to_the_tokens_before_them(
    standin: StandIn,
    seed: int,
    requests: list[tuple[int, int]],
    heads: int,
    block_size: int,
    padding: int,
    dtype: torch.dtype,
) -> None:
    """Requests of several tokens each; what is beyond them is padding, and gives zeros."""
    decode = make_decode(seed, [before + queries for queries, before in requests], heads, 3, block_size, dtype)
    picked = [row[:, :queries].transpose(0, 1) for row, (queries, _) in zip(decode.queries, requests, strict=True)]
    ropes = [row[:, :queries].transpose(0, 1) for row, (queries, _) in zip(decode.query_ropes, requests, strict=True)]
    expected = [
        attend(torch.cat([query, query_rope], -1), torch.cat([latent, rope], -1)[:, None], latent[:, None], 0.2, True)
        for query, query_rope, latent, rope in zip(picked, ropes, decode.latents, decode.ropes, strict=True)
    ]
    rest = torch.zeros(padding, heads, 16)
    packed = decode._replace(
        queries=torch.cat([*picked, rest]).to(dtype), query_ropes=torch.cat([*ropes, rest[..., :8]]).to(dtype)
    )
    out, _ = packed.call(
        npu().npu_fused_infer_attention_score_v2,
        input_layout="TND_NTD",
        sparse_mode=CAUSAL,
        actual_seq_qlen=list(accumulate(queries for queries, _ in requests)),
    )
    assert_near(out, torch.cat([*(found for found, _ in expected), rest]).transpose(0, 1), dtype)


@pytest.mark.parametrize("cuts", [(9,), (1, 9), (4, 4, 9), (0, 9), (2, 5, 7, 9)])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@covers("npu::npu_attention_update")
def test_updated_attention_is_attention_to_all_keys(
    standin: StandIn, cuts: tuple[int, ...], dtype: torch.dtype
) -> None:
    """One part is of no keys in two of these: its sum of exponentials is 0, and its output, whatever it is, is none."""
    generator = make_generator(len(cuts))
    query, key, value = draw(generator, 5, 3, 8), draw(generator, 9, 3, 8), draw(generator, 9, 3, 4)
    parts = [attend(query, key[first:last], value[first:last], 0.5) for first, last in pairwise([0, *cuts])]
    out, _ = npu().npu_attention_update(
        put(*(sums.flatten() for _, sums in parts)), put(*(part.flatten(0, 1).to(dtype) for part, _ in parts)), 0
    )
    assert_near(out, attend(query, key, value, 0.5)[0].flatten(0, 1), HALF if dtype == HALF else None)


@settings(max_examples=scale(40))
@given(
    seed=SEEDS,
    lengths=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=4),
    offsets=st.booleans(),
    cumulated=st.booleans(),
    block_size=st.sampled_from([1, 4]),
)
@covers("npu::npu_gather_pa_kv_cache")
def test_what_is_cached_is_gathered_request_by_request(
    standin: StandIn, seed: int, lengths: list[tuple[int, int]], offsets: bool, cumulated: bool, block_size: int
) -> None:
    generator = make_generator(seed)
    whole = [skipped + length for skipped, length in lengths]  # more than is gathered, where there are no offsets
    counts = [length for _, length in lengths]
    table = make_table(generator, whole, block_size)
    keys, values = ([draw(generator, length, 1, size) for length in whole] for size in (16, 8))
    found = [torch.full((sum(counts) + 2, 1, size), ABSENT, dtype=HALF).npu() for size in (16, 8)]
    npu().npu_gather_pa_kv_cache(
        cut_into_blocks(keys, table, block_size).npu(),
        cut_into_blocks(values, table, block_size).npu(),
        table.npu(),
        torch.tensor([0, *accumulate(counts)] if cumulated else counts, dtype=torch.int32).npu(),
        *found,
        seq_offset=torch.tensor([skipped for skipped, _ in lengths], dtype=torch.int32).npu() if offsets else None,
        is_seq_lens_cumsum=cumulated,
    )
    for gathered, sequences, size in zip(found, (keys, values), (16, 8), strict=True):
        starts = [skipped if offsets else 0 for skipped, _ in lengths]
        expected = [part[at : at + count] for part, at, count in zip(sequences, starts, counts, strict=True)]
        assert_equal(gathered, torch.cat([*expected, torch.full((2, 1, size), ABSENT, dtype=HALF)]))
