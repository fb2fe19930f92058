"""Calls of the operators of sparse attention, as vllm-ascend makes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tests.support.ascend.operators.checks import npu

SEQUENCES = [  # ends of two requests' queries, their lengths and blocks
    torch.tensor([3, 5], dtype=torch.int32),
    torch.tensor([7, 4], dtype=torch.int32),
    torch.tensor([[2, 0], [3, 1]], dtype=torch.int32),
]


def choose_keys(*tensors: torch.Tensor, earlier: bool = False, **changes: Any) -> Sequence[torch.Tensor]:
    """Call the operator of torch_npu, or that of vllm-ascend 0.23.0."""
    operator = torch.ops._C_ascend.npu_lightning_indexer if earlier else npu().npu_lightning_indexer
    *inputs, queries, keys, table = tensors
    lengths = {"actual_seq_lengths_query": queries, "actual_seq_lengths_key": keys, "block_table": table}
    options = {"layout_query": "TND", "layout_key": "PA_BSND", "sparse_count": 4, **changes}
    chosen: Sequence[torch.Tensor] = operator(*inputs, **lengths, **options)
    return chosen


def attend_to_chosen(*tensors: torch.Tensor, **changes: Any) -> Sequence[torch.Tensor]:
    query, query_rope, cache, key_rope, chosen, queries, keys, table = tensors
    lengths = {"actual_seq_lengths_query": queries, "actual_seq_lengths_kv": keys, "block_table": table}
    options = {"query_rope": query_rope, "key_rope": key_rope, "layout_query": "TND", "layout_kv": "PA_BSND", **changes}
    operator = torch.ops._C_ascend.npu_sparse_flash_attention
    attended: Sequence[torch.Tensor] = operator(query, cache, cache, chosen, 0.2, **lengths, **options)
    return attended


def prepare(*tensors: torch.Tensor, **changes: Any) -> Sequence[torch.Tensor]:
    x, down, up, down_keys, absorb, gamma, gamma_keys, cos, sin, *scales, index, latents, ropes = tensors
    names = "dequant_scale_x", "dequant_scale_w_dq", "dequant_scale_w_uq_qr", "dequant_scale_w_dkv_kr"
    options = {"cache_index": index, "query_norm_flag": True, "weight_quant_mode": 2, **changes}
    weights = down, up, absorb, down_keys, gamma, gamma_keys
    operator = npu().npu_mla_prolog_v3
    query, rope, _, latent, latent_scales = operator(
        x, *weights, sin, cos, latents, ropes, **dict(zip(names, scales, strict=True)), **options
    )
    return query, rope, latent, latent_scales, latents, ropes
