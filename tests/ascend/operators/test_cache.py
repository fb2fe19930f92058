"""What is written into a cache: each token's keys and values are in its slot, and nothing else has changed."""

from __future__ import annotations

import pytest
import torch

from tests.standin.cann.cann import StandIn
from tests.support.ascend.operators.angles import make_angles, rotate_side_by_side
from tests.support.ascend.operators.checks import (
    ABSENT,
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


@pytest.mark.parametrize("slots", [[0], [5, 2, 11], [7, -1, 0, -1], [-1, -1]])
@pytest.mark.parametrize("dtype", TOLERANCE)
@covers("npu::npu_kv_rmsnorm_rope_cache")
def test_a_latent_is_normed_its_rest_rotated_and_both_are_cached(
    standin: StandIn, dtype: torch.dtype, slots: list[int]
) -> None:
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RMSNorm

    generator, tokens = make_generator(len(slots)), len(slots)
    kv, gamma = draw(generator, tokens, 1, 1, 24, dtype=dtype), draw(generator, 16, dtype=dtype)
    cos, sin = make_angles(generator, tokens, 8, dtype)
    caches = [torch.full((3, 4, 1, size), ABSENT, dtype=dtype) for size in (8, 16)]
    there = put(*caches)
    *cached, ropes, latents = npu().npu_kv_rmsnorm_rope_cache(
        *put(kv, gamma, cos, sin, torch.tensor(slots)),
        *there,
        epsilon=1e-3,
        cache_mode="PA",
        is_output_kv=True,
    )
    norm = DeepseekV3RMSNorm(16, 1e-3)
    norm.weight.copy_(gamma)
    expected = rotate_side_by_side(kv[..., 16:].float(), cos, sin), norm(kv[..., :16].float())
    for cache, given_cache, given_back, found, each in zip(
        caches, there, cached, (ropes, latents), expected, strict=True
    ):
        assert_near(found, each)
        for slot, row in zip(slots, found.cpu(), strict=True):
            if slot >= 0:
                cache[slot // 4, slot % 4] = row[0]
        assert_equal(given_cache, cache)
        assert given_back.data_ptr() == given_cache.data_ptr()


@pytest.mark.parametrize("slots", [[3], [4, 0, 7, 2], [-1, 6, -1]])
@pytest.mark.parametrize("number", [torch.int32, torch.int64])
@covers("npu::npu_scatter_pa_kv_cache")
def test_keys_and_values_go_to_their_slots(standin: StandIn, number: torch.dtype, slots: list[int]) -> None:
    generator = make_generator(len(slots))
    key, value = (draw(generator, len(slots), 2, 8) for _ in range(2))
    caches = [torch.full((2, 4, 2, 8), ABSENT, dtype=HALF) for _ in range(2)]
    there = put(*caches)
    npu().npu_scatter_pa_kv_cache(*put(key, value), *there, torch.tensor(slots, dtype=number).npu(), cache_mode="Norm")
    for cache, found, rows in zip(caches, there, (key, value), strict=True):
        for slot, row in zip(slots, rows, strict=True):
            if slot >= 0:
                cache[slot // 4, slot % 4] = row
        assert_equal(found, cache)
