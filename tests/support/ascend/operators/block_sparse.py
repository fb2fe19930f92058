"""Calls of the operators of MiniMax-M3's sparse attention, as vllm-ascend makes them."""

from __future__ import annotations

from typing import Any

import torch

BLOCK_SEQUENCES = [  # blocks of two requests, their queries' edges, and their lengths
    torch.tensor([[2, 0], [3, 1]], dtype=torch.int32),
    torch.tensor([0, 3, 5], dtype=torch.int32),
    torch.tensor([7, 4], dtype=torch.int32),
]


def rate_blocks(*tensors: torch.Tensor, **changes: Any) -> torch.Tensor:
    query, cache, table, edges, keys = tensors
    lengths = {"actual_seq_qlen": edges, "actual_seq_klen": keys, "atten_mask": keys}
    rated: torch.Tensor = torch.ops._C_ascend.npu_msa_index_score(
        query, cache, table, keys // 4, **{**lengths, **changes}
    )
    return rated


def attend_to_blocks(*tensors: torch.Tensor, **changes: Any) -> torch.Tensor:
    query, keys, values, chosen, table, edges, lengths = tensors
    options = {
        "select_num_idx": torch.ones_like(chosen[..., 0]),
        "actual_seq_lengths": edges[1:] - edges[:-1],
        "actual_seq_lengths_kv": lengths,
        "num_key_value_heads": 2,
        "block_size": 4,
        "top_k": 1,
        **changes,
    }
    operator = torch.ops._C_ascend.npu_sparse_attention_score
    attended: torch.Tensor = operator(query, keys, values, chosen, table, **options)
    return attended


def update_rows(rows: torch.Tensor, places: torch.Tensor, updates: torch.Tensor) -> torch.Tensor:
    torch.ops._C_ascend.npu_scatter_nd_update_sk(rows, places, updates)
    return rows
