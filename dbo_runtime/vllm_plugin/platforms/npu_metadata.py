"""vllm-ascend's additions to the forward contexts and the attention metadata of micro-batches.

Read against vllm-ascend 0.30.0rc2 and 0.23.0.post1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import pad
from vllm.distributed import get_tensor_model_parallel_world_size

from dbo_runtime.batch import BatchSlice
from dbo_runtime.vllm_plugin.api.forward_context import NO_SLOT, take_tokens
from dbo_runtime.vllm_plugin.platforms.npu_context_parallel import shares_out_tokens
from dbo_runtime.vllm_plugin.platforms.npu_flashcomm import set_padding

if TYPE_CHECKING:
    from vllm.forward_context import ForwardContext
    from vllm_ascend.attention.attention_v1 import AscendAttentionState
    from vllm_ascend.attention.utils import AscendCommonAttentionMetadata

Tables = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines [tokens, 1, 1, rotary]."""

BUILDERS = ("indexer", "mla_v1", "sfa_v1", "dsa_v1", "context_parallel.dsa_cp")  # modules that define builders
GATHERING = "ALLGATHER"  # one MoECommType
NO_CACHE, DECODE, CHUNKED = "PrefillNoCache", "DecodeOnly", "ChunkedPrefill"  # names of AscendAttentionState


def complete_context(part: ForwardContext, piece: BatchSlice, sizes: Sequence[int]) -> None:
    """Set the token counts in a slice's forward context. *sizes* are the tokens of all data parallel ranks."""
    ranks = get_tensor_model_parallel_world_size()
    part.first_token, part.num_tokens = piece.first_token, piece.size
    part.max_tokens_across_dp = max(sizes) if sizes else piece.size
    part.padded_length = part.padded_num_tokens = -(-part.max_tokens_across_dp // ranks) * ranks
    mask = getattr(part, "mc2_mask", None)  # a view of one buffer for all tokens and their padding
    part.mc2_mask = None if mask is None else take_tokens(mask, piece, False)
    if getattr(part, "input_ids", None) is not None:  # 0.23.0 stores token ids there
        part.input_ids = take_tokens(part.input_ids, piece, 0)
    _drop_metadata_of_step(part)
    if part.moe_comm_type is not None:  # layers run as one op reduce on the comm lane; fused ones set their own
        part.moe_comm_type = type(part.moe_comm_type)[GATHERING]
        _choose_method(part)


def return_context(part: ForwardContext, step: ForwardContext) -> None:
    """Restore the *step*'s kind of communication in a slice's context. vllm-ascend chose it by the step's tokens."""
    part.moe_comm_type = step.moe_comm_type
    if hasattr(step, "moe_comm_method"):
        part.moe_comm_method = step.moe_comm_method
    set_padding(part)


def _drop_metadata_of_step(part: ForwardContext) -> None:
    """Remove data that DeepSeek V4's attention would take from the step, because slices have their own metadata.

    Kernels write the step's data on a separate stream, and nothing else waits until they have read its lengths.
    """
    executor = getattr(part, "device_metadata_executor", None)
    if executor is not None:
        torch.get_device_module("npu").current_stream().wait_stream(executor.stream)
        part.device_metadata_executor = None


def _choose_method(part: ForwardContext) -> None:
    """Set the method for the kind of communication, where layers take it from the context (0.23.0)."""
    from vllm_ascend.ops.fused_moe.moe_comm_method import get_moe_comm_method

    if _have_layers_one_method():
        part.moe_comm_method = get_moe_comm_method(part.moe_comm_type)


@cache
def _have_layers_one_method() -> bool:
    """Return whether all layers share the communication methods (0.23.0), instead of one per configuration."""
    from vllm_ascend.ops.fused_moe.moe_comm_method import get_moe_comm_method

    return "moe_config" not in signature(get_moe_comm_method).parameters


def complete_metadata(
    part: AscendCommonAttentionMetadata, derived: Sequence[str], tokens: int
) -> AscendCommonAttentionMetadata:
    """Return a slice's common metadata with its attention state, and with the *derived* fields that are set.

    In context parallel attention, the state only decides how ranks project their results. It stays the batch's state
    there, because sums differ in rounding. Ranks then have chunks of all *tokens* of a slice, padding included. In
    0.23.0, attention to compressed keys needs tables for the padding, too.
    """
    lengths = part.seq_lens_cpu_upper_bound
    queries = part.query_start_loc_cpu.diff()
    values = {"seq_lens_cpu": lengths, "num_computed_tokens_cpu": lengths - queries}
    changed = {name: values[name.removeprefix("_")] for name in derived if getattr(part, name) is not None}
    if shares_out_tokens():
        return _add_padding(replace(part, **changed), tokens)
    state = get_attention_state(part.attn_state, values["num_computed_tokens_cpu"], queries)
    part = replace(part, **changed, attn_state=state, num_input_tokens=part.num_actual_tokens)
    has_compressed_keys = getattr(part, "positions_cpu", None) is not None
    return _add_padding(part, tokens) if has_compressed_keys and _have_layers_one_method() else part


def _add_padding(part: AscendCommonAttentionMetadata, tokens: int) -> AscendCommonAttentionMetadata:
    """Return common metadata whose positions and slots are padded to *tokens* tokens, as by vllm-ascend's runner."""
    padding = (0, tokens - part.num_actual_tokens)
    padded = {"positions": pad(part.positions, padding), "slot_mapping": pad(part.slot_mapping, padding, value=NO_SLOT)}
    if getattr(part, "positions_cpu", None) is not None:  # in 0.23.0, with compressed keys
        padded["positions_cpu"] = pad(part.positions_cpu, padding)
    return replace(part, **padded, num_input_tokens=tokens)


def get_attention_state(
    state: AscendAttentionState, computed: torch.Tensor, queries: torch.Tensor
) -> AscendAttentionState:
    """Return the state of a slice, by the rule of vllm-ascend's runner (`_build_attn_state`).

    Args:
        state: state of the batch.
        computed: each request's number of tokens before this slice [requests].
        queries: each request's number of tokens in this slice [requests].
    """
    states = type(state)
    if not computed.any():
        return states[NO_CACHE]
    return states[DECODE] if (queries == 1).all() else states[CHUNKED]


@contextmanager
def new_rotary_tables() -> Iterator[None]:
    """Make builders create new tables. Cached tables are views of one buffer that each build overwrites.

    Builders of indexers also cache tables by the address of the slots, and slices have as many slots as tokens. Here
    all builds of a builder share one table.
    """
    with ExitStack() as patches:
        for module in _import_builders():
            if hasattr(module, "get_cos_and_sin_mla"):
                new = _make_tables(module.get_cos_and_sin_mla)
                patches.enter_context(_replaced(module, "get_cos_and_sin_mla", new))
            if hasattr(module, "get_cos_and_sin_dsa"):
                new = partial(_make_compressed_tables, module.get_cos_and_sin_dsa)
                patches.enter_context(_replaced(module, "get_cos_and_sin_dsa", new))
            if hasattr(module, "AscendSFAIndexerMetadataBuilder"):
                key = staticmethod(lambda common: None)
                builder = module.AscendSFAIndexerMetadataBuilder
                patches.enter_context(_replaced(builder, "_metadata_buffer_key", key))
        yield


@cache
def _import_builders() -> list[ModuleType]:
    """Return the modules whose builders look up rotary tables. 0.23.0 lacks that of the indexer."""
    names = [f"vllm_ascend.attention.{name}" for name in BUILDERS]
    return [import_module(name) for name in names if _is_there(name)]


def _is_there(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # raised if its package is missing, too
        return False


def _make_tables(original: Callable[..., Tables]) -> Callable[..., Tables]:
    return lambda positions, use_cache=False: original(positions)


def _make_compressed_tables(
    original: Callable[..., Any], positions: Any, use_cache: bool = False, **options: Any
) -> Any:
    """Look up the tables of DeepSeek V4, which has several tables by layer."""
    return original(positions, **options)


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)
