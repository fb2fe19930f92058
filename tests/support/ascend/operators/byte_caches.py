"""Calls of the operators of caches in int8, as vllm-ascend makes them, and what a row of such a cache holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tests.support.ascend.operators.checks import HALF, Tensors, draw
from tests.support.ascend.operators.sparse import SEQUENCES

TILE, ROPE = 4, 2  # of these tests; vllm-ascend has 128 and 64


def pack_row(latent: Sequence[float], rope: torch.Tensor, tile: int = TILE, clip: float = 1.0) -> torch.Tensor:
    """Return the bytes of one token: its latent by tile, its rotary part, and the scales of the tiles."""
    tiles = [latent[first : first + tile] for first in range(0, len(latent), tile)]
    scales = [max(map(abs, each)) * clip / 127 for each in tiles]
    integers = [
        max(-127, min(127, round(value / scale))) if scale else 0
        for each, scale in zip(tiles, scales, strict=True)
        for value in each
    ]
    parts = torch.tensor(integers, dtype=torch.int8), rope.contiguous(), torch.tensor(scales)
    return torch.cat([part.view(torch.int8) for part in parts])


def pack_rows(generator: torch.Generator, count: int, size: int = 8) -> Tensors:
    """Draw latents and rotary parts [count, 1, size] of tokens; return them rounded to bytes, and their bytes."""
    latents, ropes = draw(generator, count, size), draw(generator, count, ROPE)
    rows = [pack_row(latent.tolist(), rope) for latent, rope in zip(latents, ropes, strict=True)]
    packed = torch.stack(rows) if rows else torch.empty(0, size + 2 * ROPE + 4 * (size // TILE), dtype=torch.int8)
    scales = packed[:, size + 2 * ROPE :].contiguous().view(torch.float32)
    plain = (packed[:, :size].unflatten(1, (-1, TILE)) * scales[..., None]).flatten(1).to(HALF)
    return [plain[:, None], ropes[:, None], packed[:, None]]


def make_attention(generator: torch.Generator) -> Tensors:
    _, _, rows = pack_rows(generator, 16)
    chosen = torch.randint(9, (5, 1, 4), generator=generator, dtype=torch.int32)
    return [draw(generator, 5, 2, 8 + ROPE), rows.view(4, 4, 1, -1), chosen, *SEQUENCES]


def attend_to_bytes(*tensors: torch.Tensor, **changes: Any) -> Sequence[torch.Tensor]:
    query, cache, chosen, queries, keys, table = tensors
    options = {
        "actual_seq_lengths_query": queries,
        "actual_seq_lengths_kv": keys,
        "block_table": table,
        "key_quant_mode": 2,
        "value_quant_mode": 2,
        "layout_query": "TND",
        "layout_kv": "PA_BSND",
        "tile_size": TILE,
        "rope_head_dim": ROPE,
        **changes,
    }
    operator = torch.ops._C_ascend.npu_kv_quant_sparse_flash_attention_vllm
    attended: Sequence[torch.Tensor] = operator(query, cache, cache, chosen, 0.2, **options)
    return attended


def make_choice(generator: torch.Generator) -> Tensors:
    integers = [
        torch.randint(-127, 128, shape, generator=generator).to(torch.int8) for shape in ((5, 2, 8), (4, 4, 1, 8))
    ]
    scales = [torch.rand(shape, generator=generator).half() + 0.1 for shape in ((5, 2), (4, 4, 1))]
    return [*integers, draw(generator, 5, 2, dtype=torch.float16), *scales, *SEQUENCES]


def choose_keys(*tensors: torch.Tensor, **changes: Any) -> torch.Tensor:
    *inputs, queries, keys, table = tensors
    lengths = {"actual_seq_lengths_query": queries, "actual_seq_lengths_key": keys, "block_table": table}
    options = {"layout_query": "TND", "layout_key": "PA_BSND", "sparse_count": 4, **changes}
    chosen: torch.Tensor = torch.ops._C_ascend.npu_lightning_indexer_quant(*inputs, **lengths, **options)
    return chosen


def find_runs(slots: torch.Tensor, *runs: torch.Tensor, block_size: int = 4) -> Sequence[torch.Tensor]:
    torch.ops._C_ascend.store_kv_block_metadata(slots, *runs, block_size)
    return runs


def store_runs(*tensors: torch.Tensor) -> torch.Tensor:
    torch.ops._C_ascend.store_kv_block(*tensors, 4)
    return tensors[1]
