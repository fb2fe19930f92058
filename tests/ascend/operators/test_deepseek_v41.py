"""Operators and kernels of DeepSeek V4.1 against plain loops, and streams against vLLM's own torch."""

from __future__ import annotations

import ctypes
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from standin_ascend import engram
from standin_ascend.triton_kernels import TritonKernel

from tests.standin.cann.cann import StandIn
from tests.support.ascend.operators import deepseek_v4 as v4
from tests.support.ascend.operators import deepseek_v41 as v41
from tests.support.ascend.operators.blocks import cut_into_blocks, make_table
from tests.support.ascend.operators.checks import (
    ABSENT,
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

REQUESTS = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 14)), min_size=1, max_size=4)  # (new, computed) tokens
Requests = list[tuple[int, int]]
BLOCK, DEAD, PADDING = 4, -1, 3


def edges_of(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


@settings(max_examples=scale(20))
@given(seed=SEEDS, tokens=st.integers(1, 4))
@covers("_C_ascend::npu_hc_pre_v3")
def test_streams_are_mixed_as_the_part_before_has_decided(standin: StandIn, seed: int, tokens: int) -> None:
    from vllm.model_executor.kernels.mhc.torch import mhc_pre_delayed_torch

    generator = make_generator(seed)
    tensors = [*v4.make_streams(generator, tokens, 8), draw(generator, tokens, 4, dtype=torch.float32)]
    y, post, comb, mix = v41.mix_streams(*put(*tensors))
    expected = mhc_pre_delayed_torch(*tensors[:4], 1e-6, 1e-5, 1e-5, 2.0, 20, tensors[4])
    for found, wanted in zip((post, comb, y, mix), expected, strict=True):
        assert_near(found.cpu(), wanted.view(found.shape))


@settings(max_examples=scale(60))
@given(seed=SEEDS, requests=REQUESTS, ratio=st.sampled_from([0, 1, 2]))
@covers("_C_ascend::npu_sparse_flash_mla", "_C_ascend::npu_sparse_flash_mla_metadata")
def test_queries_attend_to_a_window_to_chosen_keys_and_to_a_sink(
    standin: StandIn, seed: int, requests: Requests, ratio: int
) -> None:
    generator = make_generator(seed)
    new, lengths = [count for count, _ in requests], [sum(each) for each in requests]
    query, sinks = draw(generator, sum(new), 2, 8), draw(generator, 2, dtype=torch.float32)
    keys = [draw(generator, length, 1, 8) for length in lengths]
    shared = [draw(generator, length // max(ratio, 1), 1, 8) for length in lengths]
    table, other = (make_table(generator, [24] * len(requests), BLOCK).int() for _ in range(2))
    chosen = torch.full((sum(new), 1, v4.TOPK), -1, dtype=torch.int32)
    expected = torch.zeros_like(query)
    for request, (first, last) in enumerate(pairwise(edges_of(new).tolist())):
        for number in range(first, last):
            at, seen = lengths[request] - (last - number), []
            if ratio:
                some = torch.randperm(len(shared[request]), generator=generator)[: v4.TOPK]
                chosen[number, 0, : len(some)] = some.int()
                seen = [each for each in some.tolist() if each < (at + 1) // ratio]
            near = keys[request][max(at - v4.WINDOW, 0) : at + 1, 0]
            all_keys = torch.cat([near, shared[request][seen, 0]]).double()
            scores = torch.cat([query[number].double() @ all_keys.T * 0.3, sinks.double()[:, None]], 1)
            expected[number] = (scores.softmax(-1)[:, :-1] @ all_keys).to(HALF)
    tensors = [query, cut_into_blocks(keys, table, BLOCK), table, edges_of(new), torch.tensor(lengths).int(), sinks]
    tensors += [cut_into_blocks(shared, other, BLOCK), other, chosen] if ratio else []
    assert_near(v41.attend(*put(*tensors), ratio=ratio), expected)


@settings(max_examples=scale(60))
@given(seed=SEEDS, requests=REQUESTS, ratio=st.sampled_from([1, 2]))
@covers("_C_ascend::npu_quant_lightning_indexer_v3")
def test_keys_are_chosen_among_all_or_in_chosen_blocks(
    standin: StandIn, seed: int, requests: Requests, ratio: int
) -> None:
    """The newest block is always among those that a layer chooses by their best keys."""
    generator = make_generator(seed)
    new, lengths = [count for count, _ in requests], [sum(each) for each in requests]
    query = torch.randint(-128, 128, (sum(new), 2, 8), generator=generator, dtype=torch.int8)
    weights, scales = (draw(generator, sum(new), 2, dtype=torch.float16) for _ in range(2))
    keys = [torch.randint(-128, 128, (n // ratio, 1, 8), generator=generator, dtype=torch.int8) for n in lengths]
    key_scales = [draw(generator, n // ratio, 1, dtype=torch.float16).abs() + 0.1 for n in lengths]
    table = make_table(generator, [24] * len(requests), BLOCK).int()
    best = torch.full((sum(new), 1, v4.TOPK), -1, dtype=torch.int32)
    inside, blocks = best.clone(), torch.full((sum(new), 1, v41.BLOCKS), -1, dtype=torch.int32)
    for request, (first, last) in enumerate(pairwise(edges_of(new).tolist())):
        for number in range(first, last):
            rated = []
            for each in range((lengths[request] - (last - number) + 1) // ratio):
                products = query[number].double() @ keys[request][each, 0].double()
                products = products * scales[number].double().abs() * key_scales[request][each].double()
                rated.append((-float((products.relu() * weights[number].double()).sum().float()), each))
            parts = [rated[at : at + v41.SIZE] for at in range(0, len(rated), v41.SIZE)]
            order = sorted(range(len(parts)), key=lambda part: (part < len(parts) - 1, min(parts[part]), part))
            kept = order[: v41.BLOCKS]
            for out, numbers in (
                (best, [each for _, each in sorted(rated)]),
                (blocks, kept),
                (inside, [each for _, each in sorted(rated) if each // v41.SIZE in kept]),
            ):
                taken = numbers[: out.shape[-1]]
                out[number, 0, : len(taken)] = torch.tensor(taken, dtype=torch.int32)
    floats = cut_into_blocks([each.float() for each in keys], table, BLOCK)
    caches = floats.nan_to_num().to(torch.int8), cut_into_blocks(key_scales, table, BLOCK)
    counts = torch.tensor(lengths, dtype=torch.int32)
    inputs = put(query, caches[0], weights, scales.abs(), caches[1], table, edges_of(new), counts)
    found, found_blocks = v41.choose(*inputs, ratio=ratio)
    assert_equal(found, best)
    assert_equal(found_blocks, blocks)
    assert_equal(v41.choose(*inputs, ratio=ratio, mode=v41.CONSUMER, candidate_topk_index=found_blocks)[0], inside)
    assert_equal(v41.choose(*inputs, ratio=ratio, mode=3)[0], best)


@settings(max_examples=scale(40))
@given(seed=SEEDS, steps=st.lists(st.integers(1, 40), min_size=1, max_size=4))
def test_keys_of_two_tokens_do_not_depend_on_the_steps_in_which_they_come(
    standin: StandIn, seed: int, steps: list[int]
) -> None:
    """Rings keep the last 32 tokens; the second request has no ring, and no keys."""
    generator, total, size = make_generator(seed), sum(steps), 4
    values, scores = (draw(generator, total, size, dtype=torch.float32) for _ in range(2))
    rings = torch.full((3, 32, 2 * size), ABSENT).npu()
    at = 0
    for count in steps:
        rows = slice(at, at + count)
        own = [torch.cat([torch.ones(1, size), part[rows], torch.ones(1, size)]) for part in (values, scores)]
        metadata = torch.tensor([[at, 0], [count, 1], [0, 0], [1, 0], [2, 0]], dtype=torch.int32)
        out = torch.full((count + 2, size), ABSENT, dtype=HALF).npu()
        engram.pool_pairs(*put(*own), rings, metadata.npu(), out, max_query_len=count, num_cores=1)
        expected = torch.zeros(count + 2, size)
        for place in range(at, at + count):
            if place % 2:
                shares = scores[place - 1 : place + 1].double().exp()
                pair = values[place - 1 : place + 1].double()
                expected[1 + place - at] = ((shares * pair).sum(0) / shares.sum(0)).float()
        assert_near(out, expected, HALF)
        at += count
    for place in range(max(0, total - 32), total):
        assert_equal(rings[2, place % 32].cpu(), torch.cat([values[place], scores[place]]))
    assert (rings[:2].cpu() == ABSENT).all()


@settings(max_examples=scale(40))
@given(seed=SEEDS, requests=REQUESTS, ratio=st.sampled_from([1, 2]), counts=st.booleans())
def test_chosen_keys_are_quantized_and_ordered(
    standin: StandIn, seed: int, requests: Requests, ratio: int, counts: bool
) -> None:
    generator = make_generator(seed)
    positions = torch.cat([torch.arange(start, start + count) for count, start in requests])
    chosen = torch.stack([torch.randperm(20, generator=generator)[:5] - 1 for _ in positions]).int()
    out, lengths = torch.empty_like(chosen).npu(), torch.full((len(chosen), 1), -7, dtype=torch.int32).npu()
    kernel = TritonKernel("order", engram.order_keys)[(1,)]
    kernel(*put(chosen, positions), out, lengths, len(chosen), COMPRESS_RATIO=ratio, WRITE_LENGTHS=counts)
    for row, position in enumerate(positions.tolist()):
        seen = sorted(key for key in chosen[row].tolist() if 0 <= key < (position + 1) // ratio)
        assert out[row].tolist() == [*seen, *[-1] * (5 - len(seen))]
        assert int(lengths[row, 0]) == (len(seen) if counts else -7)
    query = draw(generator, 3, 2, 8) * torch.tensor([1.0, 0.0]).view(1, 2, 1)
    numbers, scales = torch.empty(3, 2, 8, dtype=torch.int8).npu(), torch.empty(3, 2, dtype=torch.float16).npu()
    TritonKernel("quantize", engram.quantize_queries)[(1,)](query.npu(), numbers, scales, 6, blocks_per_core=1)
    assert (scales.cpu()[:, 1] == 2.0**-24).all()
    assert not numbers.cpu()[:, 1].any()
    largest = query[:, 0].float().abs().amax(-1)
    torch.testing.assert_close(scales.cpu()[:, 0].float(), largest / 127, rtol=1e-3, atol=1e-6)
    error = numbers.cpu()[:, 0] * scales.cpu()[:, 0, None].float() - query[:, 0].float()
    assert (error.abs() <= 0.55 * scales.cpu()[:, 0, None].float()).all()


@settings(max_examples=scale(40))
@given(seed=SEEDS, lengths=st.lists(st.lists(st.integers(1, 6), min_size=2, max_size=3), min_size=1, max_size=3))
def test_hashes_do_not_depend_on_the_steps_in_which_tokens_come(
    standin: StandIn, seed: int, lengths: list[list[int]]
) -> None:
    """Tokens before a step are told, as a prompt's are, or kept in a cache; dead ones cut sequences off."""
    generator = make_generator(seed)
    depth, layers, vocabulary = 3, 2, 11
    names = torch.randint(7, (vocabulary,), generator=generator, dtype=torch.int32)
    multipliers = torch.randint(1, 1 << 40, (layers, depth), generator=generator) | 1
    primes = torch.tensor([[[5, 7], [11, 13]], [[17, 19], [23, 29]]])
    offsets = torch.tensor([[0, 5, 12, 23], [0, 17, 36, 59]])
    texts = [torch.randint(vocabulary, (sum(each),), generator=generator) for each in lengths]
    is_dead = [torch.rand(len(text), generator=generator) < 0.2 for text in texts]
    table = make_table(generator, [20] * len(texts), BLOCK).int()
    cache = torch.full(((int(table.max()) + 1) * BLOCK,), 99, dtype=torch.int32).npu()
    done = [0] * len(texts)
    for step in range(3):
        counts = [each[step] if step < len(each) else 0 for each in lengths]
        spans = [range(before, before + count) for before, count in zip(done, counts, strict=True)]
        rows = [(request, at) for request, span in enumerate(spans) for at in span]
        if not rows:
            continue
        done = [span.stop for span in spans]
        ids, dead = (torch.stack([part[request][at] for request, at in rows]) for part in (texts, is_dead))
        slots = torch.tensor([int(table[request, at // BLOCK]) * BLOCK + at % BLOCK for request, at in rows])
        before = torch.full((len(texts), 2), -1)
        before_dead = torch.zeros(len(texts), 2, dtype=torch.bool)
        for request, span in enumerate(spans):
            for column in range(int(torch.randint(3, (1,), generator=generator))):  # others are in the cache
                if span.start > column:
                    before[request, column] = texts[request][span.start - 1 - column]
                    before_dead[request, column] = is_dead[request][span.start - 1 - column]
        starts, found = edges_of(counts), torch.empty(len(rows), dtype=torch.int32).npu()
        TritonKernel("requests", engram.find_requests)[(1,)](starts.npu(), found, len(rows), len(texts), 1, BLOCK_T=32)
        assert found.tolist() == [request for request, _ in rows]
        keep = TritonKernel("keep", engram.keep_tokens)[(1,)]
        keep(*put(ids, names, dead, slots), cache, len(rows), 1, 1, 1, 256, DEAD)
        out = torch.empty(len(rows), layers, 4, dtype=torch.int32).npu()
        TritonKernel("hash", engram.hash_tokens)[(1,)](
            *put(ids, names, dead, torch.tensor([at for _, at in rows]), table, starts),
            found,
            *put(multipliers, primes, offsets),
            cache,
            *put(before, before_dead),
            out,
            len(rows),
            len(cache),
            PADDING,
            cache_block_size=BLOCK,
            dead_id=DEAD,
        )
        for row, (request, at) in enumerate(rows):
            expected = hash_plainly(texts[request], is_dead[request], at, names, multipliers, primes, offsets)
            assert out[row].tolist() == expected


def hash_plainly(
    text: torch.Tensor, dead: torch.Tensor, at: int, names: Any, multipliers: Any, primes: Any, offsets: Any
) -> list[list[int]]:
    """Return the rows [layers, columns] of the tokens that end at one, of a whole text."""
    found = []
    for layer in range(len(multipliers)):
        mixed, columns, is_cut = 0, [], False
        for shift in range(multipliers.shape[1]):
            is_cut = is_cut or at < shift or bool(dead[at - shift])
            number = PADDING if is_cut else int(names[text[at - shift]])
            mixed ^= number * int(multipliers[layer, shift])
            if shift:
                rows = primes[layer, shift - 1].tolist()
                columns += [mixed % prime + int(offsets[layer, len(columns) + head]) for head, prime in enumerate(rows)]
        found.append(columns)
    return found


@settings(max_examples=scale(40))
@given(seed=SEEDS, quantized=st.booleans(), first=st.integers(0, 4), head=st.integers(0, 2))
def test_rows_are_looked_up_for_the_heads_of_a_rank(
    standin: StandIn, seed: int, quantized: bool, first: int, head: int
) -> None:
    generator = make_generator(seed)
    weight, ids = draw(generator, 6, 8), torch.randint(-1, 12, (5, 4), generator=generator, dtype=torch.int32)
    scales = torch.rand(6, 2, generator=generator) if quantized else None
    weight = torch.randint(-127, 128, (6, 8), generator=generator, dtype=torch.int8) if quantized else weight
    out = torch.full((5 * 3, 8), ABSENT, dtype=HALF).npu()
    options = {"HEAD_START": head, "LOCAL_HEADS": 2, "PAD_HEADS": 3, "GROUP": 4, "MXFP8": False, "WIDTH": 8}
    own = [weight.npu(), None if scales is None else scales.npu(), ids.npu(), out, 10, first, first + 6, 4]
    TritonKernel("look up", engram.look_up)[(10,)](*own, QUANTIZED=quantized, **options)
    expected = torch.full((5, 3, 8), ABSENT, dtype=HALF)
    for token in range(5):
        for local in range(2):
            row = int(ids[token, head + local]) - first
            expected[token, local] = 0
            if 0 <= row < 6:
                factor = 1 if scales is None else scales[row].repeat_interleave(4)
                expected[token, local] = (weight[row].float() * factor).to(HALF)
    assert_equal(out.view(5, 3, 8), expected)
    if not quantized:  # the same from memory of the host, by its address
        addresses = torch.tensor([weight.data_ptr()]).npu()
        again = torch.full((5 * 3, 8), ABSENT, dtype=HALF).npu()
        own = [addresses, None, ids.npu(), again, 10, first, first + 6, 4]
        TritonKernel("look up", engram.look_up_on_host)[(10,)](*own, QUANTIZED=False, **options)
        assert_equal(again, out)


def test_memory_of_the_host_has_an_address_on_the_device(standin: StandIn) -> None:
    """As tables of an engram that are kept there are registered; without any memory that fails."""
    runtime, memory, there = ctypes.CDLL("libascendcl.so"), ctypes.c_void_p(), ctypes.c_void_p()
    register = runtime.aclrtHostRegisterV2
    register.argtypes = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32
    assert runtime.aclrtMallocHost(ctypes.byref(memory), ctypes.c_size_t(8)) == 0
    assert register(memory, 8, 2) == 0
    assert runtime.aclrtHostGetDevicePointer(memory, ctypes.byref(there), 0) == 0
    assert there.value == memory.value
    assert runtime.aclrtHostUnregister(memory) == 0
    assert runtime.aclrtFreeHost(memory) == 0
    assert register(None, 8, 2) != 0


@covers("aten::clamp_max", "aten::signbit", "aten::eye")
def test_numbers_are_limited_and_have_signs(standin: StandIn) -> None:
    x = torch.tensor([-2.0, -0.0, 0.0, 3.0]).npu()
    assert x.clamp_max(1).tolist() == [-2.0, 0.0, 0.0, 1.0]
    assert torch.signbit(x).tolist() == [True, True, False, False]
    assert torch.eye(3, device="npu").tolist() == [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]


VARIANTS = {
    "mla, another mask": lambda: v41.attend(*put(*v4.make_attention(make_generator(0))), ori_mask_mode=0),
    "mla, lengths of a window": lambda: v41.attend(
        *put(*v4.make_attention(make_generator(0))), ori_topk_length=torch.ones(8).npu()
    ),
    "indexer, no blocks to begin with": lambda: v41.choose(
        *put(*v41.make_choice(make_generator(0))), mode=v41.CONSUMER
    ),
    "indexer, another mask": lambda: v41.choose(*put(*v41.make_choice(make_generator(0))), ratio=4),
    "streams, without a mix": lambda: v41.mix_streams(*put(*v4.make_streams(make_generator(0), 3, 8))),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_that_vllm_ascend_does_not_call_are_refused(standin: StandIn, name: str) -> None:
    with pytest.raises(NotImplementedError):
        VARIANTS[name]()
