"""Forward contexts and attention metadata of micro-batches, with what vllm-ascend adds to vLLM's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from vllm.distributed import get_tensor_model_parallel_world_size

from dbo_runtime.batch import BatchSlice
from dbo_runtime.vllm_plugin.context.splitter import ContextSplitter, Origin
from dbo_runtime.vllm_plugin.platforms import ascend

NO_CACHE, DECODE, CHUNKED = "PrefillNoCache", "DecodeOnly", "ChunkedPrefill"


class AscendContextSplitter(ContextSplitter):
    """Makes forward contexts and attention metadata as vllm-ascend has them; see `ContextSplitter`."""

    fields = ascend.FIELDS
    sliced = (*ContextSplitter.sliced, "mc2_mask")
    pads = True  # all data parallel ranks to the longest batch

    def _complete_context(self, part: Any, piece: BatchSlice, sizes: Sequence[int]) -> None:
        ranks = get_tensor_model_parallel_world_size()
        part.num_tokens = piece.size
        part.max_tokens_across_dp = max(sizes) if sizes else piece.size
        part.padded_length = part.padded_num_tokens = -(-part.max_tokens_across_dp // ranks) * ranks
        part.mc2_mask = None  # of MC2, which is not split

    def _complete_common(self, part: Any) -> Any:
        lengths = part.seq_lens_cpu_upper_bound
        queries = part.query_start_loc_cpu.diff()
        derived = {"seq_lens_cpu": lengths, "num_computed_tokens_cpu": lengths - queries}
        changed = {
            name: derived[name.removeprefix("_")] for name in self.fields.derived if getattr(part, name) is not None
        }
        state = get_attention_state(part.attn_state, derived["num_computed_tokens_cpu"], queries)
        return replace(part, **changed, attn_state=state, num_input_tokens=part.num_actual_tokens)

    def _is_cuttable(self, origin: Origin) -> bool:
        chunks = bool(self._vllm_config.scheduler_config.enable_chunked_prefill)
        return chunks and super()._is_cuttable(origin)

    def _build(self, builder: Any, part: Any, origin: Origin) -> Any:
        with ascend.own_rotary_tables():
            return super()._build(builder, part, origin)


def get_attention_state(state: Any, computed: torch.Tensor, queries: torch.Tensor) -> Any:
    """Return the state of a slice of a batch in *state*, by the rule of vllm-ascend's runner (`_build_attn_state`).

    Args:
        state: one of vllm-ascend's `AscendAttentionState`.
        computed: tokens of each request before this slice [requests].
        queries: tokens of each request in this slice [requests].
    """
    states = type(state)
    if not computed.any():
        return states[NO_CACHE]
    return states[DECODE] if (queries == 1).all() else states[CHUNKED]
