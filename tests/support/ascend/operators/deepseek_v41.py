"""Calls of the operators of DeepSeek V4.1, as vllm-ascend makes them."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.ascend.operators import deepseek_v4
from tests.support.ascend.operators.checks import Tensors
from tests.support.ascend.operators.deepseek_v4 import LENGTHS, TOPK, WINDOW

SOURCE, CONSUMER = 1, 2  # candidate modes
BLOCKS, SIZE = 2, 3  # blocks that a layer chooses, and their keys


def mix_streams(*tensors: torch.Tensor) -> Any:
    streams = tensors[0].shape[1]
    options = {"hc_mult": streams, "hc_sinkhorn_iters": 20, "norm_eps": 1e-6, "hc_eps": 1e-5}
    return torch.ops._C_ascend.npu_hc_pre_v3(*tensors, **options)


def describe_attention(edges: torch.Tensor, lengths: torch.Tensor, ratio: int = 0) -> Any:
    """Return metadata as `AscendDSAV41MetadataBuilder` asks for it."""
    return torch.ops._C_ascend.npu_sparse_flash_mla_metadata(
        2,
        1,
        8,
        cu_seqlens_q=edges,
        seqused_ori_kv=lengths,
        seqused_cmp_kv=lengths // ratio if ratio else None,
        cmp_residual_kv=lengths % ratio if ratio == 2 else None,
        batch_size=len(lengths),
        max_seqlen_q=5,
        max_seqlen_ori_kv=9,
        max_seqlen_cmp_kv=9,
        ori_topk=0,
        ori_topk_length=None,
        cmp_topk=TOPK if ratio else 0,
        cmp_ratio=ratio,
        ori_mask_mode=4,
        cmp_mask_mode=3 if ratio else 0,
        ori_win_left=WINDOW,
        ori_win_right=0,
        layout_q="TND",
        layout_kv="PA_BBND",
        has_ori_kv=True,
        has_cmp_kv=bool(ratio),
    )


def attend(*tensors: torch.Tensor, ratio: int = 0, **changes: Any) -> Any:
    query, keys, table, edges, lengths, sinks, *shared = tensors
    names = ("cmp_kv", "cmp_block_table", "cmp_sparse_indices")
    options = {
        "metadata": describe_attention(edges, lengths, ratio),
        "seqused_cmp_kv": lengths // ratio if ratio else None,
        "cmp_residual_kv": lengths % ratio if ratio == 2 else None,
        "softmax_scale": 0.3,
        "cmp_ratio": ratio,
        "ori_mask_mode": 4,
        "cmp_mask_mode": 3 if ratio else 0,
        "ori_win_left": WINDOW,
        "ori_win_right": 0,
        "layout_q": "TND",
        "layout_kv": "PA_BBND",
        "topk_value_mode": 1,
        "return_softmax_lse": False,
        **dict(zip(names, shared, strict=False)),
        **changes,
    }
    where = {"ori_block_table": table, "cu_seqlens_q": edges, "seqused_ori_kv": lengths}
    return torch.ops._C_ascend.npu_sparse_flash_mla(query, ori_kv=keys, sinks=sinks, **where, **options)[0]


def choose(*tensors: torch.Tensor, ratio: int = 2, mode: int = SOURCE, **changes: Any) -> Any:
    """Return the numbers of keys [tokens, 1, topk], and those of blocks, if any are chosen."""
    query, keys, weights, query_scales, key_scales, table, edges, lengths = tensors
    residuals = lengths % 2 if ratio == 2 else None
    describe = torch.ops._C_ascend.npu_quant_lightning_indexer_v2_metadata
    common = {
        "cu_seqlens_q": edges,
        "seqused_k": lengths // ratio,
        "cmp_residual_k": residuals,
        "max_seqlen_q": 5,
        "layout_q": "TND",
        "layout_k": "PA_BBND",
        "mask_mode": 3,
        "cmp_ratio": ratio,
    }
    metadata = describe(2, 1, 8, TOPK, 2, batch_size=len(lengths), max_seqlen_k=9, **common)
    options = {"candidate_mode": mode, "candidate_topk_blocks": BLOCKS, "candidate_block_size": SIZE, **changes}
    call, inputs = torch.ops._C_ascend.npu_quant_lightning_indexer_v3, (query, keys, weights, query_scales, key_scales)
    chosen, _, blocks = call(*inputs, TOPK, 2, block_table=table, metadata=metadata, **common, **options)
    return chosen, blocks


def make_choice(generator: torch.Generator) -> Tensors:
    """Return what an indexer of DeepSeek V4 takes, with lengths in tokens."""
    return [*deepseek_v4.make_choice(generator)[:7], LENGTHS]
