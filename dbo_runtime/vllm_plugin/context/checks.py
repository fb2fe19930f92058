"""Why a model or a step cannot be split yet. Each is a reason to decline, never to guess."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from dbo_runtime.batch import BatchSlice
from dbo_runtime.decline import Decline
from dbo_runtime.vllm_plugin.api import compat
from dbo_runtime.vllm_plugin.platforms import ascend


def check_config(vllm_config: Any) -> str | None:
    """Return the first feature in use that splitting does not support."""
    if compat.get_device_type() == "npu":
        hazard = ascend.check_config(vllm_config)
        if hazard is not None:
            return hazard
    parallel = vllm_config.parallel_config
    model = vllm_config.model_config
    # A stage hands on a residual whose rows are spread over ranks then, and only compiled steps make such a one
    # (is_residual_scattered_for_sp in vLLM's v1/worker/utils.py).
    scattered = parallel.pipeline_parallel_size > 1 and vllm_config.compilation_config.pass_config.enable_sp
    hazards = (
        (scattered, "pipeline parallel with sequence parallelism (enable_sp)"),
        (parallel.enable_elastic_ep, "elastic expert parallel"),
        (parallel.enable_eplb, "expert load balancing (EPLB)"),
        (parallel.use_sequence_parallel_moe, "sequence-parallel MoE"),
        (parallel.decode_context_parallel_size > 1, "decode context parallel"),
        (parallel.prefill_context_parallel_size > 1, "prefill context parallel"),
        (model.enable_return_routed_experts, "returning the routed experts"),
        (parallel.use_ubatching, "vLLM's own micro-batching (--enable-dbo)"),
        (vllm_config.kv_transfer_config is not None, "a KV connector"),
        (vllm_config.speculative_config is not None, "speculative decoding"),
        (vllm_config.lora_config is not None, "LoRA"),
        (model.is_hybrid or model.is_attention_free, "a state-space model"),
        (model.is_encoder_decoder, "an encoder-decoder model"),
    )
    return next((f"not supported yet: {what}" for found, what in hazards if found), None)


def check_mode(context: Any) -> Decline | None:
    """Return why a step with this forward context runs as vLLM would run it, even if nothing is cut, or None."""
    if not isinstance(context.attn_metadata, dict):
        return Decline("attention metadata is split already")
    if context.cudagraph_runtime_mode.name == "FULL":
        return Decline("full-graph step")
    return None


def check_capture(context: Any) -> Decline | None:
    """Return why a step that vLLM runs to capture it, or right before, is captured as vLLM has it, or None."""
    if not isinstance(context.attn_metadata, dict):
        return Decline("attention metadata is split already")
    return ascend.check_step(context)


def check_context(context: Any, tokens: int) -> Decline | None:
    """Return why a step with this forward context runs whole, or None."""
    hazard = check_mode(context)
    if hazard is not None:
        return hazard
    if context.is_padding is not None and context.is_padding.shape[0] != tokens:
        return Decline("padded batch")
    return ascend.check_step(context)


def check_agreed_context(context: Any) -> Decline | None:
    """Return why a step runs whole on all data parallel ranks, from what vLLM has made equal on them."""
    if context.dp_metadata is None:
        return Decline("no data parallel metadata")
    if context.cudagraph_runtime_mode.name != "NONE":
        return Decline("padded to the size of a graph on all data parallel ranks")
    return ascend.check_step(context)


def check_prefix_cache(
    slices: Sequence[BatchSlice],
    query_starts: np.ndarray[Any, Any],
    seq_lens: np.ndarray[Any, Any],
    block_table: np.ndarray[Any, Any],
    block_size: int,
) -> Decline | None:
    """Decline if a request reads cached blocks that a later micro-batch has yet to write.

    A request can be admitted on a prefix-cache hit against blocks that another request of the same step computes. Run
    whole, every write of a layer comes before every read; split, the writer may be in a later micro-batch. vLLM's own
    guard (`_allow_microbatching` in gpu_model_runner.py) is off unless its own micro-batching is on.

    Args:
        slices: the micro-batches.
        query_starts: first token of each request, and the end [requests + 1].
        seq_lens: tokens of each request after this step [requests].
        block_table: KV blocks of each request [requests, blocks].
        block_size: tokens a block.
    """
    query_lens = np.diff(query_starts)
    computed = seq_lens - query_lens
    if not (computed > 0).any():
        return None
    for earlier in slices[:-1]:
        written = _find_blocks_written_after(earlier.last_token, query_starts, seq_lens, block_table, block_size)
        for request in range(earlier.first_request, earlier.last_request):
            read = block_table[request, : computed[request] // block_size]
            if np.isin(read, written).any():
                return Decline("a request reads prefix-cache blocks that a later micro-batch writes")
    return None


def _find_blocks_written_after(
    token: int,
    query_starts: np.ndarray[Any, Any],
    seq_lens: np.ndarray[Any, Any],
    block_table: np.ndarray[Any, Any],
    block_size: int,
) -> np.ndarray[Any, Any]:
    """Return the KV blocks that the tokens from *token* on are written to."""
    blocks = []
    for request, (start, end) in enumerate(pairwise(query_starts.tolist())):
        if end > token:
            length = int(seq_lens[request])
            first = length - (end - max(start, token))
            blocks.append(block_table[request, first // block_size : -(-length // block_size)])
    return np.concatenate(blocks) if blocks else np.empty(0, dtype=block_table.dtype)
