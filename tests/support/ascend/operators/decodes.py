"""Requests that decode: each attends to what a cache that has blocks holds of its sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from tests.support.ascend.operators.attention import attend
from tests.support.ascend.operators.blocks import cut_into_blocks, make_table
from tests.support.ascend.operators.checks import HALF, NO_MASK, Tensors, draw, make_generator, put


def decode(operator: Callable[..., Any], tensors: Sequence[torch.Tensor], **options: Any) -> Any:
    """Call one of the forms of the operator."""
    query, latent, query_rope, rope, table = tensors
    ropes = {"query_rope": query_rope, "key_rope": rope, "block_table": table}
    return operator(query, latent, latent, **ropes, **options)


class Decode(NamedTuple):
    """Requests that decode, each with its queries [heads, queries, size] and a latent sequence [length, size]."""

    queries: torch.Tensor
    query_ropes: torch.Tensor
    latents: Tensors
    ropes: Tensors
    table: torch.Tensor
    block_size: int

    def list_tensors(self) -> Tensors:
        """Return what `decode` takes."""
        caches = (cut_into_blocks(part, self.table, self.block_size) for part in (self.latents, self.ropes))
        latent, rope = (cache[:, None] for cache in caches)
        return [self.queries, latent, self.query_ropes, rope, self.table]

    def list_settings(self) -> dict[str, Any]:
        """Return the options of the operator."""
        return {
            "num_query_heads": self.queries.shape[1],
            "num_key_value_heads": 1,
            "input_layout": "BNSD_NBSD",
            "sparse_mode": NO_MASK,
            "softmax_scale": 0.2,
            "block_size": self.block_size,
            "actual_seq_kvlen": [len(latent) for latent in self.latents],
        }

    def call(self, operator: Callable[..., Any], **changes: Any) -> Any:
        """Call one of the forms of the operator."""
        return decode(operator, put(*self.list_tensors()), **{**self.list_settings(), **changes})

    def expect(self) -> torch.Tensor:
        """Return [heads, requests, queries, latent size] by torch's own attention; zeros for what has no keys."""
        query = torch.cat([self.queries, self.query_ropes], -1)
        out = torch.zeros(self.queries.shape).transpose(0, 1).contiguous()
        for request, (latent, rope) in enumerate(zip(self.latents, self.ropes, strict=True)):
            if len(latent):
                key = torch.cat([latent, rope], -1)[:, None]
                found, _ = attend(query[request].transpose(0, 1), key, latent[:, None], 0.2)
                out[:, request] = found.transpose(0, 1)
        return out


def make_decode(
    seed: int, lengths: Sequence[int], heads: int = 4, queries: int = 1, block_size: int = 4, dtype: torch.dtype = HALF
) -> Decode:
    generator = make_generator(seed)
    return Decode(
        draw(generator, len(lengths), heads, queries, 16, dtype=dtype),
        draw(generator, len(lengths), heads, queries, 8, dtype=dtype),
        [draw(generator, length, 16, dtype=dtype) for length in lengths],
        [draw(generator, length, 8, dtype=dtype) for length in lengths],
        make_table(generator, lengths, block_size),
        block_size,
    )
