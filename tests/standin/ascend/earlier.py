"""Operators that vllm-ascend 0.23.0 calls, and later releases by another name: of ATB, and of its compiled half."""

from __future__ import annotations

from typing import Any

import torch
from standin_ascend import attention, experts, vision
from standin_ascend.kernels import launch, refuse
from standin_ascend.others import compute_cached_rotation

ATB_SCHEMAS = (
    "npu_paged_cache_load(Tensor key_cache, Tensor value_cache, Tensor block_table, Tensor context_lens, *,"
    " Tensor? seq_starts=None, bool? cumsum=False, Tensor? key=None, Tensor? value=None) -> (Tensor, Tensor)",
    "_npu_reshape_and_cache(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache,"
    " Tensor slot_indices) -> ()",
    "_npu_rotary_embedding(Tensor positions, Tensor(a!) query, Tensor(b!) key, int head_size, Tensor cos_sin_cache,"
    " bool is_neox_style=True) -> ()",
)
ROUTING_SCHEMA = (
    "npu_moe_init_routing_custom(Tensor x, Tensor expert_idx, *, Tensor? scale=None, Tensor? offset=None,"
    " int active_num=-1, int expert_capacity=-1, int expert_num=-1, int drop_pad_mode=0, int expert_tokens_num_type=0,"
    " bool expert_tokens_num_flag=False, int quant_mode=0, int[2] active_expert_range=[], int row_idx_type=0)"
    " -> (Tensor, Tensor, Tensor, Tensor)"
)
INDEXER_SCHEMA = (
    "npu_lightning_indexer(Tensor query, Tensor key, Tensor weights, *, Tensor? actual_seq_lengths_query=None,"
    " Tensor? actual_seq_lengths_key=None, Tensor? block_table=None, str layout_query='BSND', str layout_key='BSND',"
    " int sparse_count=2048, int sparse_mode=3) -> (Tensor, Tensor)"
)

META_SCHEMAS = (  # of operators of which it registers the shapes, and that its models here do not call
    "get_masked_input_and_mask(Tensor input, int org_vocab_start_index, int org_vocab_end_index,"
    " int num_org_vocab_padding, int added_vocab_start_index, int added_vocab_end_index)"
    " -> (Tensor masked_input, Tensor mask)",
    "bgmv_expand(Tensor! x, Tensor! weight, Tensor! indices, Tensor! y, int slice_offset, int slice_size) -> Tensor",
    "sgmv_expand(Tensor! x, Tensor! weight, Tensor! lora_indices, Tensor! seq_len, Tensor! y, int slice_offset,"
    " int slice_size) -> Tensor",
)


def load_cache(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    seq_starts: torch.Tensor | None = None,
    cumsum: bool | None = False,
    key: torch.Tensor | None = None,
    value: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`npu_paged_cache_load`: as `npu_gather_pa_kv_cache`, into *key* and *value*."""
    if key is None or value is None:
        raise NotImplementedError("npu_paged_cache_load without tensors for its result")
    caches = key_cache, value_cache, block_table, context_lens
    attention.gather_cache(*caches, key, value, seq_offset=seq_starts, is_seq_lens_cumsum=bool(cumsum))
    return key, value


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_indices: torch.Tensor,
) -> None:
    """`_npu_reshape_and_cache`: write keys and values [tokens, heads, size] to their slots."""
    launch("ReshapeAndCache", vision.compute_scatter, key, value, key_cache, value_cache, slot_indices)


def rotate_in_place(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox_style: bool = True,
) -> None:
    """`_npu_rotary_embedding`: rotate queries and keys [tokens, heads * size] by rows of the cache, in halves."""
    if not is_neox_style:
        raise NotImplementedError("_npu_rotary_embedding of pairs side by side")
    parts = [query, key]
    launch("RotaryEmbedding", compute_rotation_in_place, positions, parts, cos_sin_cache, head_size)


def compute_rotation_in_place(
    positions: torch.Tensor, parts: list[torch.Tensor], cache: torch.Tensor, head_size: int
) -> None:
    """Rotate copies, and write over *parts*."""
    compute_cached_rotation(positions, [part.clone() for part in parts], cache, head_size, parts)


def route(x: torch.Tensor, expert_idx: torch.Tensor, **options: Any) -> tuple[torch.Tensor, ...]:
    """`npu_moe_init_routing_custom`: as `npu_moe_init_routing_v2`."""
    known = "scale", "active_num", "expert_num", "expert_tokens_num_type", "expert_tokens_num_flag"
    refuse("npu_moe_init_routing_custom", options, *known, "quant_mode", "active_expert_range", "row_idx_type")
    return experts.route(x, expert_idx, **{"quant_mode": 0, **options})
