"""Angles of rotary embedding, and the rotation by them that DeepSeek has."""

from __future__ import annotations

import torch

from tests.support.ascend.operators.checks import Tensors


def make_angles(generator: torch.Generator, tokens: int, size: int, dtype: torch.dtype) -> Tensors:
    """Return cosines and sines [tokens, 1, 1, size]."""
    angles = torch.rand(tokens, 1, 1, size // 2, generator=generator) * 6
    return [part.to(dtype).repeat(1, 1, 1, 2) for part in (angles.cos(), angles.sin())]


def rotate_side_by_side(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate [tokens, heads, 1, size] as transformers' DeepSeek-V3 does."""
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave

    rotated, _ = apply_rotary_pos_emb_interleave(x, x, cos[:, 0].float(), sin[:, 0].float())
    return rotated
