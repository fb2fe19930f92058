"""The operator that prepares latent attention from static int8, against transformers' parts in float32."""

from __future__ import annotations

import pytest
import torch

from tests.standin.cann.cann import StandIn
from tests.support.ascend.operators.angles import make_angles
from tests.support.ascend.operators.checks import (
    ABSENT,
    ANY_FORMAT,
    HALF,
    Tensors,
    assert_near,
    covers,
    make_generator,
    put,
)
from tests.support.ascend.operators.mlapo import KEYS, LATENT, PLAIN, ROTATED, make_tensors, prepare

pytestmark = ANY_FORMAT


def rotate_halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate [tokens, heads, size] as transformers' Llama does."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    rotated, _ = apply_rotary_pos_emb(x, x, cos[:, 0, 0].float(), sin[:, 0, 0].float(), unsqueeze_dim=1)
    return rotated


def multiply(x: torch.Tensor, part: Tensors) -> torch.Tensor:
    """Round *x* to a byte, and multiply by a matrix [out, in]."""
    weight, bias, scales, scale, offset = part
    integers = (x / scale + offset).round().clamp(-128, 127)
    return ((integers @ weight.float().T + bias) * scales).to(HALF).float()


@pytest.mark.parametrize("slots", [[0], [5, 2, 11], [7, -1, 0, -1]])
@covers("_C_ascend::mla_preprocess")
def test_queries_and_keys_are_made_of_bytes_by_one_scale(standin: StandIn, slots: list[int]) -> None:
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RMSNorm

    generator, tokens = make_generator(len(slots)), len(slots)
    made = make_tensors(generator, tokens)
    angles = make_angles(generator, tokens, ROTATED, HALF)
    caches = [torch.full((3, 4, 1, size), ABSENT, dtype=HALF) for size in (KEYS, ROTATED)]
    query, rope, latent, *cached = prepare(
        *put(*made.list_tensors(), *angles, torch.tensor(slots, dtype=torch.int32), *caches)
    )
    norms = DeepseekV3RMSNorm(LATENT, 1e-6), DeepseekV3RMSNorm(KEYS, 1e-6)
    for norm, gamma in zip(norms, (made.gamma, made.gamma_keys), strict=True):
        norm.weight.copy_(gamma)
    keys, lower = multiply(made.x.float(), made.first).split([KEYS + ROTATED, LATENT], -1)
    assert_near(latent, norms[0](lower) + made.beta.float())
    heads = multiply(latent.cpu().float(), made.second).unflatten(1, (2, PLAIN + ROTATED))
    assert_near(query, torch.einsum("thp,hpl->thl", heads[..., :PLAIN], made.absorb.float()))
    assert_near(rope, rotate_halves(heads[..., PLAIN:], *angles))
    parts = norms[1](keys[:, :KEYS]), rotate_halves(keys[:, None, KEYS:], *angles)[:, 0]
    for cache, part in zip(cached, parts, strict=True):
        expected = torch.full((12, part.shape[1]), ABSENT)
        for slot, row in zip(slots, part, strict=True):
            if slot >= 0:
                expected[slot] = row
        assert_near(cache.flatten(0, 2), expected)


def test_matrices_are_cut_into_columns_as_vllm_ascend_cuts_them(standin: StandIn) -> None:
    from vllm_ascend.attention.utils import transdata

    from tests.support.ascend.operators.mlapo import cut_into_columns

    matrix = torch.randint(-128, 128, (48, 96), generator=make_generator(0), dtype=torch.int8)
    assert torch.equal(cut_into_columns(matrix)[0], transdata(matrix, block_size=(16, 32)))
