"""A call of the operator that prepares latent attention from static int8, as vllm-ascend makes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from tests.support.ascend.operators.checks import HALF, Tensors, draw

HIDDEN, LATENT, KEYS, PLAIN, ROTATED, HEADS = 64, 32, 16, 8, 16, 2


class Made(NamedTuple):
    """Tokens, and weights: matrices [out, in] with biases, scales, and the scale and offset of what they multiply."""

    x: torch.Tensor
    first: Tensors
    second: Tensors
    absorb: torch.Tensor
    gamma: torch.Tensor
    beta: torch.Tensor
    gamma_keys: torch.Tensor

    def list_tensors(self) -> Tensors:
        """Return what `prepare` takes."""
        parts = [[cut_into_columns(part[0]), *part[1:]] for part in (self.first, self.second)]
        return [self.x, *parts[0], *parts[1], *self[3:]]


def make_tensors(generator: torch.Generator, tokens: int) -> Made:
    """Draw all."""
    return Made(
        draw(generator, tokens, HIDDEN),
        make_matrix(generator, KEYS + ROTATED + LATENT, HIDDEN),
        make_matrix(generator, HEADS * (PLAIN + ROTATED), LATENT),
        draw(generator, HEADS, PLAIN, KEYS),
        draw(generator, LATENT),
        draw(generator, LATENT),
        draw(generator, KEYS),
    )


def make_matrix(generator: torch.Generator, rows: int, columns: int) -> Tensors:
    return [
        torch.randint(-128, 128, (rows, columns), generator=generator, dtype=torch.int8),
        torch.randint(-999, 999, (rows,), generator=generator, dtype=torch.int32),
        torch.rand(rows, generator=generator) / 4096 + 1e-5,
        torch.tensor([0.04]),
        torch.tensor([5], dtype=torch.int8),
    ]


def cut_into_columns(matrix: torch.Tensor) -> torch.Tensor:
    """Cut a matrix [out, in] into columns of 32 -> [1, in / 32, out, 32]."""
    return torch.stack(matrix.split(32, 1))[None]


def prepare(*tensors: torch.Tensor, **changes: Any) -> Sequence[torch.Tensor]:
    """Call it; return queries, their rotary parts and their latent, and the caches."""
    x, *rest = tensors
    first, second, (absorb, gamma, beta, gamma_keys, cos, sin, slots, cache, ropes) = rest[:5], rest[5:10], rest[10:]
    tokens = x.shape[0]
    query, rope = (torch.empty(tokens, HEADS, size, dtype=HALF, device=x.device) for size in (KEYS, ROTATED))
    latent = torch.empty(tokens, LATENT, dtype=HALF, device=x.device)
    names = "bias", "quant_scale", "quant_offset"
    options = {
        **{f"{name}0": first[place] for name, place in zip(names, (1, 3, 4), strict=True)},
        **{f"{name}1": second[place] for name, place in zip(names, (1, 3, 4), strict=True)},
        **dict.fromkeys(("ctkv_scale", "q_nope_scale"), torch.ones(1, dtype=HALF, device=x.device)),
        "cache_mode": "krope_ctkv",
        "quant_mode": "per_tensor_quant_asymm",
        "enable_inner_out": True,
        **changes,
    }
    weights = first[0], first[2], gamma, beta, second[0], second[2], gamma_keys, cos, sin, absorb
    out = {"q_out0": query, "kv_cache_out0": cache, "q_out1": rope, "kv_cache_out1": ropes, "inner_out": latent}
    torch.ops._C_ascend.mla_preprocess(x, *weights, cache, ropes, slots, **options, **out)
    return query, rope, latent, cache, ropes
