"""Calls of the operators of DeepSeek V4, as vllm-ascend makes them, and what they compute, in plain loops."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from tests.support.ascend.operators.checks import HALF, Tensors, draw

WINDOW, TOPK = 5, 3  # tokens before a query, and compressed keys that an indexer chooses
STARTS = torch.tensor([6, 0], dtype=torch.int32)  # of two requests with three and five new tokens
EDGES = torch.tensor([0, 3, 8], dtype=torch.int32)
LENGTHS = torch.tensor([9, 5], dtype=torch.int32)
TABLE = torch.tensor([[3, 1, 4], [2, 5, 6]], dtype=torch.int32)


class Sizes(NamedTuple):
    """Of a compressor: tokens a key, whether keys overlap, channels, and those that are rotated."""

    ratio: int = 4
    coff: int = 2
    size: int = 8
    rotary: int = 4
    hidden: int = 6


OVERLAPPING = Sizes()


def make_streams(generator: torch.Generator, tokens: int, hidden: int, streams: int = 4) -> Tensors:
    """Return streams, and the weights that mix them."""
    mixes = (2 + streams) * streams
    shapes = (mixes, streams * hidden), (3,), (mixes,)
    return [draw(generator, tokens, streams, hidden), *(draw(generator, *s, dtype=torch.float32) for s in shapes)]


def mix_streams(*tensors: torch.Tensor) -> Any:
    return torch.ops._C_ascend.npu_hc_pre_v2(*tensors, tensors[0].shape[1], 20, 1e-6, 1e-5)


def make_results(generator: torch.Generator, tokens: int, hidden: int, streams: int = 4) -> Tensors:
    """Return the result of a part of a layer, the streams before, and how both are spread."""
    return [
        draw(generator, 1, tokens, hidden),
        draw(generator, 1, tokens, streams, hidden),
        draw(generator, 1, tokens, streams, dtype=torch.float32),
        draw(generator, 1, tokens, streams, streams, dtype=torch.float32),
    ]


def make_compressor(generator: torch.Generator, tokens: int, rows: int, sizes: Sizes = OVERLAPPING) -> Tensors:
    """Return tokens, weights, states of blocks of three, and angles."""
    wide = sizes.coff * sizes.size
    angles = torch.randn(rows, sizes.rotary // 2, generator=generator).repeat_interleave(2, -1)
    return [
        draw(generator, tokens, sizes.hidden),
        draw(generator, wide, sizes.hidden),
        draw(generator, wide, sizes.hidden),
        draw(generator, 8, 3, 2 * wide, dtype=torch.float32),
        draw(generator, sizes.ratio, wide, dtype=torch.float32),
        draw(generator, sizes.size, dtype=torch.float32),
        angles.sin(),
        angles.cos(),
    ]


def compress(*tensors: torch.Tensor, sizes: Sizes = OVERLAPPING, **changes: Any) -> Any:
    *inputs, table, edges, starts = tensors
    options = {
        "rope_head_dim": sizes.rotary,
        "cmp_ratio": sizes.ratio,
        "coff": sizes.coff,
        "norm_eps": 1e-6,
        "rotary_mode": 2,
        "cache_mode": 1,
        "seqused": None,
        **changes,
    }
    call = torch.ops._C_ascend.compressor
    return call(*inputs, state_block_table=table, cu_seqlens=edges, start_pos=starts, **options)


def compress_plainly(tensors: Sequence[torch.Tensor], table: Any, edges: Any, starts: Any, sizes: Sizes) -> Any:
    """Return keys and states, token by token and key by key; the states given stay as they are."""
    x, wkv, wgate, states, ape, gamma, sines, cosines = (tensor.double() for tensor in tensors)
    states, size, block = states.clone(), sizes.size, states.shape[1]
    keys: list[torch.Tensor] = []
    for request, (first, last) in enumerate(pairwise(edges.tolist())):
        for number in range(first, last):
            at = int(starts[request]) + number - first
            state = torch.cat([wkv @ x[number], wgate @ x[number] + ape[at % sizes.ratio]]).float()
            states[table[request, at // block], at % block] = state.double()
            if (at + 1) % sizes.ratio:
                continue
            values, scores = [], []
            for place in range(at + 1 - sizes.coff * sizes.ratio, at + 1):
                if place < 0:
                    continue
                value, score = states[table[request, place // block], place % block].chunk(2)
                half = slice(size) if place <= at - sizes.ratio else slice(-size, None)  # for the next key, or its own
                values.append(value[half])
                scores.append(score[half])
            pooled = (torch.stack(scores).softmax(0) * torch.stack(values)).sum(0)
            normed = pooled / (pooled.square().mean() + 1e-6).sqrt() * gamma
            keys.append(rotate(normed, cosines[len(keys)], sines[len(keys)]))
    return torch.stack(keys) if keys else x.new_empty(0, size), states


def rotate(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Rotate the last channels of *x* [size] as complex numbers, which lie pair by pair."""
    rotary = cosines.shape[0]
    turns = torch.complex(cosines[::2], sines[::2])
    turned = torch.view_as_complex(x[-rotary:].reshape(-1, 2).contiguous()) * turns
    return torch.cat([x[:-rotary], torch.view_as_real(turned).flatten()])


def find_places(*tensors: torch.Tensor, rows: int = 5) -> Any:
    return torch.ops._C_ascend.compressor_metadata(*tensors, 2, 2, 4, rows, 2)


def find_places_into(*tensors: torch.Tensor) -> Any:
    return torch.ops._C_ascend.compressor_metadata_out(*tensors[:5], 2, 2, 4, 2, *tensors[5:])


def describe_attention(edges: torch.Tensor, lengths: torch.Tensor) -> Any:
    """Return metadata as `AscendDSAMetadataBuilder` asks for it."""
    return torch.ops._C_ascend.npu_sparse_attn_sharedkv_metadata(
        num_heads_q=2,
        num_heads_kv=1,
        head_dim=8,
        cu_seqlens_q=edges,
        cu_seqlens_ori_kv=edges,
        cu_seqlens_cmp_kv=None,
        seqused_q=edges[:0],
        seqused_kv=lengths,
        max_seqlen_q=5,
        max_seqlen_kv=9,
        batch_size=len(lengths),
        cmp_topk=TOPK,
        cmp_ratio=4,
        ori_mask_mode=4,
        cmp_mask_mode=3,
        ori_win_left=WINDOW,
        ori_win_right=0,
        layout_q="TND",
        layout_kv="PA_ND",
        device="npu",
    )


def attend(*tensors: torch.Tensor, **changes: Any) -> Any:
    query, keys, table, edges, lengths, sinks, *compressed = tensors
    names = ("cmp_kv", "cmp_block_table", "cmp_sparse_indices")
    options = {
        "cu_seqlens_ori_kv": edges,
        "metadata": describe_attention(edges, lengths),
        "softmax_scale": 0.3,
        "cmp_ratio": 4 if compressed else 1,
        "ori_mask_mode": 4,
        "ori_win_left": WINDOW,
        "ori_win_right": 0,
        "layout_q": "TND",
        "layout_kv": "PA_ND",
        **dict(zip(names, compressed, strict=False)),
        **changes,
    }
    where = {"ori_block_table": table, "cu_seqlens_q": edges, "seqused_kv": lengths}
    return torch.ops._C_ascend.npu_sparse_attn_sharedkv(query, ori_kv=keys, sinks=sinks, **where, **options)[0]


def make_attention(generator: torch.Generator) -> Tensors:
    return [
        draw(generator, 8, 2, 8),
        draw(generator, 7, 3, 1, 8),
        TABLE,
        EDGES,
        LENGTHS,
        draw(generator, 2, dtype=torch.float32),
    ]


def describe_choice(edges: torch.Tensor, lengths: torch.Tensor, residuals: torch.Tensor) -> Any:
    return torch.ops._C_ascend.npu_quant_lightning_indexer_v2_metadata(
        num_heads_q=2,
        num_heads_k=1,
        head_dim=8,
        topk=TOPK,
        quant_mode=2,
        cu_seqlens_q=edges,
        seqused_k=lengths,
        cmp_residual_k=residuals,
        batch_size=len(lengths),
        max_seqlen_q=5,
        max_seqlen_k=9,
        layout_q="TND",
        layout_k="PA_BBND",
        mask_mode=3,
        cmp_ratio=4,
        device="npu",
    )


def choose(*tensors: torch.Tensor, **changes: Any) -> Any:
    query, keys, weights, query_scales, key_scales, table, edges, lengths, residuals = tensors
    options = {
        "topk": TOPK,
        "quant_mode": 2,
        "metadata": describe_choice(edges, lengths, residuals),
        "layout_q": "TND",
        "layout_k": "PA_BBND",
        "mask_mode": 3,
        "cmp_ratio": 4,
        "return_value": 0,
        **changes,
    }
    where = {"cu_seqlens_q": edges, "seqused_k": lengths, "cmp_residual_k": residuals, "block_table": table}
    inputs = {"query": query, "key": keys, "weights": weights}
    scales = {"query_dequant_scale": query_scales, "key_dequant_scale": key_scales}
    return torch.ops._C_ascend.npu_quant_lightning_indexer_v2(**inputs, **scales, **where, **options)[0]


def describe_earlier_choice(ends: torch.Tensor, lengths: torch.Tensor) -> Any:
    """Return metadata as in vllm-ascend 0.23, of the ends of requests and the tokens of their keys."""
    return torch.ops._C_ascend.npu_vllm_quant_lightning_indexer_metadata(
        actual_seq_lengths_query=ends,
        actual_seq_lengths_key=lengths,
        num_heads_q=2,
        num_heads_k=1,
        head_dim=8,
        query_quant_mode=0,
        key_quant_mode=0,
        batch_size=len(lengths),
        max_seqlen_q=5,
        max_seqlen_k=9,
        layout_query="TND",
        layout_key="PA_BSND",
        sparse_count=TOPK,
        sparse_mode=3,
        pre_tokens=(1 << 63) - 1,
        next_tokens=(1 << 63) - 1,
        cmp_ratio=4,
        device="npu",
    )


def choose_earlier(*tensors: torch.Tensor, **changes: Any) -> Any:
    """Call the indexer as vllm-ascend 0.23 does."""
    query, keys, weights, query_scales, key_scales, table, ends, lengths = tensors
    options = {
        "metadata": describe_earlier_choice(ends, lengths),
        "query_quant_mode": 0,
        "key_quant_mode": 0,
        "layout_query": "TND",
        "layout_key": "PA_BSND",
        "sparse_count": TOPK,
        "sparse_mode": 3,
        "pre_tokens": (1 << 63) - 1,
        "next_tokens": (1 << 63) - 1,
        "cmp_ratio": 4,
        "return_value": False,
        **changes,
    }
    where = {"actual_seq_lengths_query": ends, "actual_seq_lengths_key": lengths, "block_table": table}
    inputs = {"query": query, "key": keys, "weights": weights}
    scales = {"query_dequant_scale": query_scales, "key_dequant_scale": key_scales}
    return torch.ops._C_ascend.npu_vllm_quant_lightning_indexer(**inputs, **scales, **where, **options)[0]


def make_earlier_choice(generator: torch.Generator) -> Tensors:
    """Return what `make_choice` does, with the ends of requests, and with lengths in tokens."""
    return [*make_choice(generator)[:6], EDGES[1:], LENGTHS]


def make_choice(generator: torch.Generator) -> Tensors:
    keys = torch.randint(-128, 128, (7, 3, 1, 8), generator=generator, dtype=torch.int8)
    return [
        torch.randint(-128, 128, (8, 2, 8), generator=generator, dtype=torch.int8),
        keys,
        draw(generator, 8, 2, dtype=torch.float16),
        draw(generator, 8, 2, dtype=torch.float16).abs(),
        draw(generator, 7, 3, 1, dtype=torch.float16).abs(),
        TABLE,
        EDGES,
        LENGTHS // 4,
        LENGTHS % 4,
    ]


def route(*tensors: torch.Tensor, **changes: Any) -> Any:
    x, bias, *hashed = tensors
    ids, table = hashed or (None, None)
    options = {
        "k": 2,
        "k_group": 1,
        "group_count": 1,
        "routed_scaling_factor": 1.5,
        "eps": 1e-20,
        "group_select_mode": 1,
        "renorm": 0,
        "norm_type": 2,
        "out_flag": False,
        "bias_vl": None,
        "image_sentinel_lo": 129257,
        "image_sentinel_count": 5,
        **changes,
    }
    call = torch.ops._C_ascend.moe_gating_top_k_hash
    return call(**{"x": x, "bias": None if hashed else bias, "input_ids": ids, "tid2eid": table, **options})[:2]


def rotate_in_place(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, **changes: Any) -> torch.Tensor:
    turned = x.clone()
    size, rotary = x.shape[-1], cosines.shape[-1]
    options = {"rotary_mode": "interleave", "partial_slice": [size - rotary, size], **changes}
    torch.ops._C_ascend.inplace_partial_rotary_mul(turned, cosines, sines, **options)
    return turned


def make_rotation(generator: torch.Generator) -> Tensors:
    angles = torch.randn(3, 1, 1, 4, generator=generator)
    return [draw(generator, 3, 1, 2, 8), angles.cos(), angles.sin()]


def make_norm(generator: torch.Generator) -> Tensors:
    return [draw(generator, 5, 8), draw(generator, 8, dtype=HALF)]


def update_rows(rows: torch.Tensor, places: torch.Tensor, updates: torch.Tensor) -> torch.Tensor:
    torch.ops._C_ascend.npu_scatter_nd_update_v2(rows, places, updates)
    return rows
