"""The indexer of DeepSeek V4 as vllm-ascend 0.23.0 calls it: lengths are of tokens, and edges have no leading zero."""

from __future__ import annotations

from typing import Any

import torch
from standin_ascend.compressed_attention import (
    CAUSAL,
    METADATA,
    check_description,
    compute_choice,
    compute_description,
)
from standin_ascend.kernels import launch

SCHEMAS = (  # vllm-ascend's own
    "npu_vllm_quant_lightning_indexer(Tensor query, Tensor key, Tensor weights, Tensor query_dequant_scale,"
    " Tensor key_dequant_scale, int query_quant_mode=0, int key_quant_mode=0, Tensor? actual_seq_lengths_query=None,"
    " Tensor? actual_seq_lengths_key=None, Tensor? block_table=None, Tensor? metadata=None, str layout_query='BSND',"
    " str layout_key='BSND', int sparse_count=2048, int sparse_mode=3, int pre_tokens=9223372036854775807,"
    " int next_tokens=9223372036854775807, int cmp_ratio=1, bool return_value=False)"
    " -> (Tensor sparse_indices, Tensor sparse_values)",
    "npu_vllm_quant_lightning_indexer_metadata(int num_heads_q, int num_heads_k, int head_dim, int query_quant_mode,"
    " int key_quant_mode, Tensor? actual_seq_lengths_query=None, Tensor? actual_seq_lengths_key=None, int batch_size=0,"
    " int max_seqlen_q=0, int max_seqlen_k=0, str layout_query='BSND', str layout_key='BSND', int sparse_count=2048,"
    " int sparse_mode=3, int pre_tokens=9223372036854775807, int next_tokens=9223372036854775807, int cmp_ratio=1,"
    " str device='npu') -> Tensor",
    "npu_scatter_nd_update_v2(Tensor(a!) var, Tensor indices, Tensor update) -> ()",
)
LAYOUTS, PER_TOKEN = ("TND", "PA_BSND"), 0


def choose_keys(
    query: torch.Tensor,
    key: torch.Tensor,
    weights: torch.Tensor,
    query_dequant_scale: torch.Tensor,
    key_dequant_scale: torch.Tensor,
    query_quant_mode: int,
    key_quant_mode: int,
    actual_seq_lengths_query: torch.Tensor,
    actual_seq_lengths_key: torch.Tensor,
    block_table: torch.Tensor,
    metadata: torch.Tensor,
    layout_query: str,
    layout_key: str,
    sparse_count: int,
    sparse_mode: int,
    pre_tokens: int,
    next_tokens: int,
    cmp_ratio: int,
    return_value: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`npu_vllm_quant_lightning_indexer`: numbers of the best compressed keys of each query [tokens, 1, count].

    Tensors are those of `compressed_attention.choose_compressed`, but for the lengths of keys, which are of tokens.
    """
    modes = query_quant_mode, key_quant_mode, layout_query, layout_key, sparse_mode, return_value
    if modes != (PER_TOKEN, PER_TOKEN, *LAYOUTS, CAUSAL, False):
        raise NotImplementedError(f"npu_vllm_quant_lightning_indexer: quantization, layouts and modes {modes}")
    out = query.new_empty(query.shape[0], 1, sparse_count, dtype=torch.int32)
    inputs = query, key, weights, query_dequant_scale, key_dequant_scale, block_table
    lengths = actual_seq_lengths_query, actual_seq_lengths_key
    launch("VllmQuantLightningIndexer", compute_earlier_choice, *inputs, *lengths, metadata, out, cmp_ratio)
    return out, query.new_empty(0, dtype=torch.bfloat16)


def compute_earlier_choice(*arguments: Any) -> None:
    """Derive how many compressed keys there are, and how many tokens come after the last one."""
    *inputs, ends, lengths, metadata, out, ratio = arguments
    edges, counts = add_zero(ends), lengths // ratio
    check_description(metadata, edges, lengths)
    compute_description(edges, counts, compressed := torch.empty_like(metadata))
    compute_choice(*inputs, edges, counts, lengths % ratio, compressed, out, ratio)


def describe_choice(
    num_heads_q: int,
    num_heads_k: int,
    head_dim: int,
    query_quant_mode: int,
    key_quant_mode: int,
    actual_seq_lengths_query: torch.Tensor,
    actual_seq_lengths_key: torch.Tensor,
    *rest: Any,
) -> torch.Tensor:
    """`npu_vllm_quant_lightning_indexer_metadata`: the lengths of queries and keys."""
    out = actual_seq_lengths_query.new_empty(METADATA, dtype=torch.int32)
    lengths = actual_seq_lengths_query, actual_seq_lengths_key
    launch("VllmQuantLightningIndexerMetadata", compute_earlier_description, *lengths, out)
    return out


def compute_earlier_description(ends: torch.Tensor, lengths: torch.Tensor, out: torch.Tensor) -> None:
    """Write what `compute_description` does, from the ends of requests."""
    compute_description(add_zero(ends), lengths, out)


def add_zero(ends: torch.Tensor) -> torch.Tensor:
    """Return the edges of requests [requests + 1] by their ends [requests]."""
    return torch.cat([ends.new_zeros(1), ends])
