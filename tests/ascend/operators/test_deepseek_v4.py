"""Operators of DeepSeek V4 against plain loops over tokens and keys, and against vLLM's own torch where it has that."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from standin_ascend import chunks, compressed_attention
from standin_ascend.triton_kernels import TritonKernel

from tests.standin.cann.cann import StandIn
from tests.support.ascend.operators import deepseek_v4 as v4
from tests.support.ascend.operators.blocks import cut_into_blocks, make_table
from tests.support.ascend.operators.checks import (
    ANY_FORMAT,
    HALF,
    SEEDS,
    assert_equal,
    assert_near,
    covers,
    draw,
    make_generator,
    put,
)
from tests.support.profiles import scale

pytestmark = ANY_FORMAT

REQUESTS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 14)), min_size=1, max_size=4)  # (new, computed) tokens
Requests = list[tuple[int, int]]
BLOCK = 4


def edges_of(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


@settings(max_examples=scale(20))
@given(seed=SEEDS, tokens=st.integers(1, 4))
@covers("_C_ascend::npu_hc_pre_v2", "_C_ascend::npu_hc_post")
def test_streams_are_mixed_and_spread_as_in_vllm(standin: StandIn, seed: int, tokens: int) -> None:
    from vllm.model_executor.kernels.mhc.torch import mhc_post_torch, mhc_pre_torch

    generator = make_generator(seed)
    x, weights, scales, base = v4.make_streams(generator, tokens, 8)
    y, post, comb = v4.mix_streams(*put(x, weights, scales, base))
    expected = mhc_pre_torch(x, weights, scales, base, 1e-6, 1e-5, 1e-5, 2.0, 20)
    for found, wanted in zip((post, comb, y), expected, strict=True):
        assert_near(found.cpu(), wanted.view(found.shape))
    torch.testing.assert_close(comb.cpu().sum(-2), torch.ones(tokens, 4), rtol=1e-3, atol=1e-3)
    result = draw(generator, tokens, 8)
    found = torch.ops._C_ascend.npu_hc_post(*(tensor.unsqueeze(0) for tensor in (result.npu(), x.npu(), post, comb)))
    assert_near(found[0].cpu(), mhc_post_torch(result, x, post.cpu()[..., None], comb.cpu()))


@settings(max_examples=scale(20))
@given(seed=SEEDS)
@covers("_C_ascend::npu_rms_norm_cast", "_C_ascend::npu_rms_norm_dynamic_quant")
def test_norms_are_cast_when_they_are_rounded_and_quantized_before(standin: StandIn, seed: int) -> None:
    x, gamma = v4.make_norm(make_generator(seed))
    wanted = torch.nn.functional.rms_norm(x.double(), (8,), gamma.double(), 1e-6)
    normed, cast = torch.ops._C_ascend.npu_rms_norm_cast(*put(x, gamma), 1e-6)
    assert_near(normed, wanted, HALF)
    assert_equal(cast.cpu(), normed.cpu().float())
    numbers, scales = torch.ops._C_ascend.npu_rms_norm_dynamic_quant(*put(x, gamma), epsilon=1e-6)
    torch.testing.assert_close(scales.cpu(), (wanted.abs().amax(-1) / 127).float())
    assert ((numbers.cpu() * scales.cpu()[:, None] - wanted).abs() <= 0.501 * scales.cpu()[:, None]).all()


@settings(max_examples=scale(40))
@given(seed=SEEDS, negate=st.booleans(), dtype=st.sampled_from([torch.float32, HALF]))
@covers("_C_ascend::inplace_partial_rotary_mul")
def test_the_last_channels_are_rotated_in_place(standin: StandIn, seed: int, negate: bool, dtype: torch.dtype) -> None:
    """Each pair by its own cosines and sines, which need not be equal within a pair; others stay to the bit."""
    x, cosines, sines = v4.make_rotation(make_generator(seed))
    x = x.to(dtype)
    found = v4.rotate_in_place(*put(x, cosines, sines), negate_sin=negate).cpu()
    assert_equal(found[..., :4], x[..., :4])
    even, odd = x[..., 4::2].double(), x[..., 5::2].double()
    sign = -1 if negate else 1
    expected = torch.empty_like(x[..., 4:], dtype=torch.float64)
    expected[..., ::2] = even * cosines[..., ::2] - sign * odd * sines[..., ::2]
    expected[..., 1::2] = odd * cosines[..., 1::2] + sign * even * sines[..., 1::2]
    assert_near(found[..., 4:], expected, dtype)


@settings(max_examples=scale(40))
@given(seed=SEEDS, requests=REQUESTS, overlaps=st.booleans(), padding=st.integers(0, 2))
@covers("_C_ascend::compressor")
def test_keys_are_compressed_from_tokens_and_states(
    standin: StandIn, seed: int, requests: Requests, overlaps: bool, padding: int
) -> None:
    generator = make_generator(seed)
    sizes = v4.Sizes(coff=2 if overlaps else 1)
    new, computed = (list(numbers) for numbers in zip(*requests, strict=True))
    rows = sum((start + count) // 4 - start // 4 for count, start in requests)
    tensors = v4.make_compressor(generator, sum(new), rows + padding, sizes)
    blocks = 1 + torch.randperm(9 * len(requests), generator=generator).int().view(len(requests), 9)
    tensors[3] = draw(generator, 9 * len(requests) + 1, 3, 4 * sizes.size if overlaps else 2 * sizes.size).float()
    edges, starts = edges_of(new), torch.tensor(computed, dtype=torch.int32)
    keys, states = v4.compress_plainly(tensors, blocks, edges, starts, sizes)
    there = put(*tensors, blocks, edges, starts)
    found = v4.compress(*there, sizes=sizes).cpu()
    assert_near(found[:rows], keys, HALF)
    assert not found[rows:].any()
    assert_near(there[3].cpu(), states.float())


def test_states_without_a_block_are_not_kept(standin: StandIn) -> None:
    """As vLLM's tables have 0 for blocks that a request has no more."""
    tensors = v4.make_compressor(make_generator(0), 8, 3)
    table = torch.tensor([[3, 1, 0], [2, 0, 0]], dtype=torch.int32)
    there = put(*tensors, table, v4.EDGES, v4.STARTS)
    v4.compress(*there)
    after = there[3].cpu()
    assert_equal(after[0], tensors[3][0])
    assert not torch.equal(after[2], tensors[3][2])


@settings(max_examples=scale(40))
@given(seed=SEEDS, length=st.integers(1, 8))
@covers("_C_ascend::compressor")
def test_a_request_in_two_steps_has_the_keys_of_one(standin: StandIn, seed: int, length: int) -> None:
    """To the bit: a state is rounded in either case."""
    x, wkv, wgate, states, ape, gamma, *angles = v4.make_compressor(make_generator(seed), 9, 3)
    table = torch.tensor([[1, 2, 3]], dtype=torch.int32)
    there, parts = states.npu(), []
    for first, last in ((0, 9), (0, length), (length, 9)):
        rows, number = last // 4 - first // 4, first // 4
        turned = [angle[number : number + max(rows, 1)] for angle in angles]  # the operator gives at least a row
        own = put(ape, gamma, *turned, table, edges_of([last - first]), torch.tensor([first], dtype=torch.int32))
        parts.append(v4.compress(*put(x[first:last], wkv, wgate), there, *own).cpu()[:rows])
    assert_equal(torch.cat(parts[1:]), parts[0])


@settings(max_examples=scale(40))
@given(seed=SEEDS, requests=REQUESTS, padding=st.integers(0, 2))
@covers("_C_ascend::compressor_metadata", "_C_ascend::compressor_metadata_out")
def test_places_of_new_keys_are_found(standin: StandIn, seed: int, requests: Requests, padding: int) -> None:
    generator = make_generator(seed)
    cosines, sines = (draw(generator, 40, 4, dtype=torch.float32) for _ in range(2))
    table = make_table(generator, [24] * len(requests), BLOCK)[: len(requests)].int()
    edges = edges_of([count for count, _ in requests])
    starts = torch.tensor([start for _, start in requests], dtype=torch.int32)
    wanted: list[tuple[Any, Any, tuple[int, int]]] = []
    for request, (count, start) in enumerate(requests):
        for at in range(start, start + count):
            if (at + 1) % 4 == 0:
                number = at // 4
                slot = int(table[request, number // BLOCK]), number % BLOCK
                wanted.append((cosines[4 * number], sines[4 * number], slot))
    unused = torch.ones(4), torch.zeros(4), (-1, BLOCK - 1)
    wanted += [unused] * (padding + (not wanted))
    inputs = put(cosines, sines, edges, starts, table)
    found = torch.ops._C_ascend.compressor_metadata(*inputs, BLOCK, 2, 4, len(wanted), len(requests))
    given_ = [torch.empty_like(each) for each in found]
    written = torch.ops._C_ascend.compressor_metadata_out(*inputs, BLOCK, 2, 4, len(requests), *given_)
    for name in (found, written):
        assert_equal(name[0].cpu()[:, 0, 0], torch.stack([each for each, _, _ in wanted]))
        assert_equal(name[1].cpu()[:, 0, 0], torch.stack([each for _, each, _ in wanted]))
        assert name[2].tolist() == [list(slot) for _, _, slot in wanted]


@settings(max_examples=scale(60))
@given(seed=SEEDS, requests=REQUESTS, kind=st.sampled_from(["window", "all", "chosen"]), padding=st.integers(0, 2))
@covers("_C_ascend::npu_sparse_attn_sharedkv", "_C_ascend::npu_sparse_attn_sharedkv_metadata")
def test_queries_attend_to_a_window_to_compressed_keys_and_to_a_sink(
    standin: StandIn, seed: int, requests: Requests, kind: str, padding: int
) -> None:
    generator = make_generator(seed)
    new, lengths = [count for count, _ in requests], [sum(each) for each in requests]
    tokens = sum(new)
    query, sinks = draw(generator, tokens + padding, 2, 8), draw(generator, 2, dtype=torch.float32)
    keys = [draw(generator, length, 1, 8) for length in lengths]
    compressed = [draw(generator, length // 4, 1, 8) for length in lengths]
    table, other = (make_table(generator, [24] * len(requests), BLOCK).int() for _ in range(2))
    chosen = torch.full((tokens + padding, 1, v4.TOPK), -1, dtype=torch.int32)
    expected = torch.zeros_like(query)
    for request, (first, last) in enumerate(pairwise(edges_of(new).tolist())):
        for number in range(first, last):
            at = lengths[request] - (last - number)
            seen = list(range((at + 1) // 4)) if kind != "window" else []
            if kind == "chosen":
                some = torch.randperm(lengths[request] // 4, generator=generator)[: v4.TOPK]
                chosen[number, 0, : len(some)] = some.int()
                seen = [each for each in some.tolist() if each in seen]
            near = keys[request][max(at - v4.WINDOW, 0) : at + 1, 0]
            all_keys = torch.cat([near, compressed[request][seen, 0]]).double()
            scores = torch.cat([query[number].double() @ all_keys.T * 0.3, sinks.double()[:, None]], 1)
            expected[number] = (scores.softmax(-1)[:, :-1] @ all_keys).to(HALF)
    tensors = [query, cut_into_blocks(keys, table, BLOCK), table, edges_of(new), torch.tensor(lengths).int(), sinks]
    if kind != "window":
        tensors += [cut_into_blocks(compressed, other, BLOCK), other]
    if kind == "chosen":
        tensors.append(chosen)
    assert_near(v4.attend(*put(*tensors)), expected)


@settings(max_examples=scale(40))
@given(seed=SEEDS, requests=REQUESTS)
@covers(
    "_C_ascend::npu_quant_lightning_indexer_v2",
    "_C_ascend::npu_quant_lightning_indexer_v2_metadata",
    "_C_ascend::npu_vllm_quant_lightning_indexer",
    "_C_ascend::npu_vllm_quant_lightning_indexer_metadata",
)
def test_the_best_keys_that_are_complete_are_chosen(standin: StandIn, seed: int, requests: Requests) -> None:
    """A key can be seen from the last of its four tokens on; the operator of vllm-ascend 0.23 chooses the same."""
    generator = make_generator(seed)
    new, lengths = [count for count, _ in requests], [sum(each) for each in requests]
    query = torch.randint(-128, 128, (sum(new), 2, 8), generator=generator, dtype=torch.int8)
    weights, scales = (draw(generator, sum(new), 2, dtype=torch.float16) for _ in range(2))
    keys = [torch.randint(-128, 128, (n // 4, 1, 8), generator=generator, dtype=torch.int8) for n in lengths]
    key_scales = [draw(generator, n // 4, 1, dtype=torch.float16).abs() + 0.1 for n in lengths]
    table = make_table(generator, [24] * len(requests), BLOCK).int()
    expected = torch.full((sum(new), 1, v4.TOPK), -1, dtype=torch.int32)
    for request, (first, last) in enumerate(pairwise(edges_of(new).tolist())):
        for number in range(first, last):
            seen = (lengths[request] - (last - number) + 1) // 4
            rated = []
            for each in range(seen):
                products = query[number].double() @ keys[request][each, 0].double()
                products = products * scales[number].double().abs() * key_scales[request][each].double()
                rated.append((-float((products.relu() * weights[number].double()).sum().float()), each))
            best = [each for _, each in sorted(rated)[: v4.TOPK]]
            expected[number, 0, : len(best)] = torch.tensor(best, dtype=torch.int32)
    counts = torch.tensor(lengths, dtype=torch.int32)
    floats = cut_into_blocks([each.float() for each in keys], table, BLOCK)
    caches = floats.nan_to_num().to(torch.int8), cut_into_blocks(key_scales, table, BLOCK)
    inputs = put(query, caches[0], weights, scales.abs(), caches[1], table)
    assert_equal(v4.choose(*inputs, *put(edges_of(new), counts // 4, counts % 4)), expected)
    assert_equal(v4.choose_earlier(*inputs, *put(edges_of(new)[1:], counts)), expected)


def test_metadata_of_other_lengths_is_refused(standin: StandIn) -> None:
    """It says how cores share out the work."""
    metadata = v4.describe_attention(*put(v4.EDGES, v4.LENGTHS)).cpu()
    compressed_attention.check_description(metadata, v4.EDGES, v4.LENGTHS)
    for lengths in (v4.LENGTHS + 1, v4.LENGTHS[:1]):
        with pytest.raises(ValueError, match="metadata of lengths"):
            compressed_attention.check_description(metadata, v4.EDGES, lengths)


@settings(max_examples=scale(40))
@given(requests=REQUESTS, ranks=st.integers(1, 3), starts=st.booleans())
def test_queries_and_keys_of_a_chunk_of_tokens_are_found(
    standin: StandIn, requests: Requests, ranks: int, starts: bool
) -> None:
    """Each query is in one chunk; the keys are those up to the last query that a request has there."""
    tokens = [(request, start + each) for request, (count, start) in enumerate(requests) for each in range(count)]
    edges = edges_of([count for count, _ in requests])
    lengths = torch.tensor([sum(each) for each in requests], dtype=torch.int32)
    size = -(-len(tokens) // ranks)
    for rank in range(ranks):
        own = tokens[rank * size : (rank + 1) * size]
        counts = [sum(request == each for each, _ in own) for request in range(len(requests))]
        seen = [max([at + 1 for each, at in own if each == request], default=0) for request in range(len(requests))]
        found = [torch.zeros(len(requests) + extra, dtype=torch.int32).npu() for extra in (1, 0, 0)]
        kernel = TritonKernel("chunk", chunks.find_local_lengths)[(1,)]
        span = rank * size, (rank + 1) * size, len(requests)
        kernel(*put(edges, lengths), *found[:2], *span, found[2], COMPUTE_START_POS=starts)
        assert_equal(found[0], edges_of(counts))
        assert found[1].tolist() == seen
        assert found[2].tolist() == [start if starts else 0 for _, start in requests]


@settings(max_examples=scale(40))
@given(seed=SEEDS, hashed=st.booleans(), dtype=st.sampled_from([torch.float32, HALF]))
@covers("_C_ascend::moe_gating_top_k_hash")
def test_experts_are_the_best_or_those_of_the_token(
    standin: StandIn, seed: int, hashed: bool, dtype: torch.dtype
) -> None:
    """As in vllm-ascend's own test of the operator."""
    generator = make_generator(seed)
    logits, bias = draw(generator, 5, 6, dtype=dtype), draw(generator, 6, dtype=dtype)
    ids = torch.randint(9, (5,), generator=generator)
    table = torch.stack([torch.randperm(6, generator=generator)[:2] for _ in range(9)]).int()
    scores = torch.nn.functional.softplus(logits.double()).sqrt()
    chosen = table[ids].long() if hashed else (scores + bias.double()).topk(2).indices
    shares = scores.gather(1, chosen)
    weights, found = v4.route(*put(logits, bias, *((ids, table) if hashed else ())))
    assert_equal(found, chosen.int())
    assert_near(weights, shares / shares.sum(-1, keepdim=True) * 1.5, dtype)


@settings(max_examples=scale(40))
@given(seed=SEEDS, hashed=st.booleans())
@covers("_C_ascend::moe_gating_top_k_hash")
def test_tokens_of_images_have_the_best_experts_by_a_bias_of_their_own(
    standin: StandIn, seed: int, hashed: bool
) -> None:
    """As `select_deepseek_v4_vision_experts` of vllm-ascend; images have the numbers 3 and 4 here."""
    generator = make_generator(seed)
    logits, bias, image_bias = (draw(generator, *shape, dtype=torch.float32) for shape in ((5, 6), (6,), (6,)))
    ids = torch.randint(9, (5,), generator=generator)
    table = torch.stack([torch.randperm(6, generator=generator)[:2] for _ in range(9)]).int()
    scores = torch.nn.functional.softplus(logits.double()).sqrt()
    for_text = table[ids].long() if hashed else (scores + bias).topk(2).indices
    for_images = (scores + image_bias).topk(2).indices
    chosen = torch.stack([for_images[row] if token in (3, 4) else for_text[row] for row, token in enumerate(ids)])
    images = {"bias_vl": image_bias.npu(), "image_sentinel_lo": 3, "image_sentinel_count": 2}
    logits, bias, ids, table = put(logits, bias, ids, table)
    if hashed:
        _, found = v4.route(logits, bias, ids, table, **images)
    else:
        _, found = v4.route(logits, bias, input_ids=ids, **images)
    assert_equal(found, chosen.int())


@covers("_C_ascend::npu_scatter_nd_update_sk", "_C_ascend::npu_scatter_nd_update_v2")
def test_rows_are_written_to_their_blocks_and_places(standin: StandIn) -> None:
    """Of a cache whose blocks lie apart; rows with a negative block are left out."""
    generator = make_generator(0)
    whole, rows = draw(generator, 4, 5, 1, 6), draw(generator, 3, 1, 6)
    there, again = whole.npu(), whole.npu()
    places = torch.tensor([[2, 1], [-1, 3], [0, 0]], dtype=torch.int32)
    torch.ops._C_ascend.npu_scatter_nd_update_sk(there[:, :4], *put(places, rows))
    torch.ops._C_ascend.npu_scatter_nd_update_v2(again[:, :4], *put(places, rows))
    whole[2, 1], whole[0, 0] = rows[0], rows[2]
    assert_equal(there, whole)
    assert_equal(again, whole)
