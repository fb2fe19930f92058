"""Operators of vllm-ascend 0.23.0, against plain references, or against a later operator that has tests of its own."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch

from tests.standin.cann.cann import StandIn
from tests.support.ascend.operators.angles import make_angles
from tests.support.ascend.operators.blocks import cut_into_blocks, make_table
from tests.support.ascend.operators.checks import (
    ABSENT,
    ANY_FORMAT,
    COUNTS,
    CUMULATED,
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
from tests.support.ascend.operators.sparse import SEQUENCES, choose_keys

pytestmark = ANY_FORMAT


@pytest.mark.parametrize("cumulated", [False, True])
@pytest.mark.parametrize("skipped", [(0, 0, 0), (3, 0, 5)])
@covers("atb::npu_paged_cache_load")
def test_what_is_cached_is_loaded_request_by_request(
    standin: StandIn, skipped: tuple[int, ...], cumulated: bool
) -> None:
    generator, counts = make_generator(sum(skipped)), [4, 0, 9]
    whole = [at + count for at, count in zip(skipped, counts, strict=True)]
    table = make_table(generator, whole, 4)
    keys, values = ([draw(generator, length, 1, size) for length in whole] for size in (16, 8))
    found = [torch.full((13, 1, size), ABSENT, dtype=HALF).npu() for size in (16, 8)]
    lengths = torch.tensor([0, *accumulate(counts)] if cumulated else counts, dtype=torch.int32)
    caches = [cut_into_blocks(part, table, 4) for part in (keys, values)]
    starts = torch.tensor(skipped, dtype=torch.int32).npu()
    torch.ops.atb.npu_paged_cache_load(
        *put(*caches, table, lengths), seq_starts=starts, cumsum=cumulated, key=found[0], value=found[1]
    )
    for gathered, sequences in zip(found, (keys, values), strict=True):
        parts = zip(sequences, skipped, counts, strict=True)
        assert_equal(gathered, torch.cat([part[at : at + count] for part, at, count in parts]))


@pytest.mark.parametrize("slots", [[3], [4, 0, 7, 2], [-1, 6, -1]])
@covers("atb::_npu_reshape_and_cache")
def test_keys_and_values_go_to_their_slots(standin: StandIn, slots: list[int]) -> None:
    generator = make_generator(len(slots))
    key, value = (draw(generator, len(slots), 2, 8) for _ in range(2))
    caches = [torch.full((2, 4, 2, 8), ABSENT, dtype=HALF) for _ in range(2)]
    there = put(*caches)
    torch.ops.atb._npu_reshape_and_cache(*put(key, value), *there, torch.tensor(slots, dtype=torch.int32).npu())
    for cache, found, rows in zip(caches, there, (key, value), strict=True):
        for slot, row in zip(slots, rows, strict=True):
            if slot >= 0:
                cache[slot // 4, slot % 4] = row
        assert_equal(found, cache)


@pytest.mark.parametrize(("heads", "size"), [(1, 2), (4, 8)])
@pytest.mark.parametrize("dtype", TOLERANCE)
@covers("atb::_npu_rotary_embedding")
def test_queries_and_keys_rotate_in_place_as_in_llama(
    standin: StandIn, dtype: torch.dtype, heads: int, size: int
) -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    generator, tokens = make_generator(size), 5
    cos, sin = (part[:, 0, 0] for part in make_angles(generator, 9, size, dtype))
    positions = torch.randperm(9, generator=generator)[:tokens]
    parts = [draw(generator, tokens, count * size, dtype=dtype) for count in (heads, 1)]
    cache = torch.cat([cos[:, : size // 2], sin[:, : size // 2]], -1)
    found = put(*parts)
    torch.ops.atb._npu_rotary_embedding(positions.npu(), *found, size, cache.npu(), True)
    for part, out in zip(parts, found, strict=True):
        each = part.float().unflatten(-1, (-1, size))[None]
        tables = (table[positions].float()[None] for table in (cos, sin))
        expected, _ = apply_rotary_pos_emb(each, each, *tables, unsqueeze_dim=2)
        assert_near(out, expected[0].flatten(1))


@pytest.mark.parametrize("count_type", [CUMULATED, COUNTS])
@covers("_C_ascend::npu_moe_init_routing_custom", "npu::npu_moe_init_routing_v2")
def test_choices_are_sorted_as_by_the_later_operator(standin: StandIn, count_type: int) -> None:
    generator = make_generator(count_type)
    x, ids = draw(generator, 5, 8), torch.randint(6, (5, 2), generator=generator, dtype=torch.int32)
    options = {
        "active_num": 10,
        "expert_num": 6,
        "expert_tokens_num_type": count_type,
        "expert_tokens_num_flag": True,
        "active_expert_range": [2, 5],
        "quant_mode": -1,
    }
    found = torch.ops._C_ascend.npu_moe_init_routing_custom(*put(x, ids), **options)
    assert_equal(found[:3], npu().npu_moe_init_routing_v2(*put(x, ids), **options)[:3])


@covers("_C_ascend::npu_lightning_indexer", "npu::npu_lightning_indexer")
def test_keys_are_chosen_as_by_the_later_operator(standin: StandIn) -> None:
    generator = make_generator(0)
    tensors = put(draw(generator, 5, 2, 8), draw(generator, 4, 4, 1, 8), draw(generator, 5, 2), *SEQUENCES)
    found, wanted = (choose_keys(*tensors, earlier=earlier)[0] for earlier in (True, False))
    assert_equal(found, wanted)
