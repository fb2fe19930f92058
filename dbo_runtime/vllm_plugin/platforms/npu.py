"""The platform of NPUs, served by vllm-ascend. Read against vllm-ascend 0.30.0rc2 and 0.23.0.post1."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from dbo_runtime.decline import Decline
from dbo_runtime.devices import Device, open_device
from dbo_runtime.ir.op import SIDE
from dbo_runtime.vllm_plugin.api.fields import FIELDS, SLICED_CONTEXT_TENSORS, Fields
from dbo_runtime.vllm_plugin.api.known import LATEST_ASCEND, PROVEN_ON_ASCEND, Proven
from dbo_runtime.vllm_plugin.platforms.platform import Platform, StageBuffers

if TYPE_CHECKING:  # the doctor imports platforms without torch and vLLM
    import torch
    import torch.distributed as dist
    from structlog.typing import FilteringBoundLogger
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
    from vllm.v1.attention.backend import AttentionMetadata, CommonAttentionMetadata

    from dbo_runtime.batch import BatchSlice
    from dbo_runtime.config import RuntimeConfig
    from dbo_runtime.vllm_plugin.api.latent_attention import LatentParts
    from dbo_runtime.vllm_plugin.api.moe import MoeLayer
    from dbo_runtime.vllm_plugin.platforms.encoder_attention import EncoderAttention
    from dbo_runtime.vllm_plugin.platforms.npu_flashcomm import FlashComm

ASCEND_FIELDS = FIELDS._replace(
    per_request=(*FIELDS.per_request, "group_len", "group_key_idx", "group_key_cache_idx"),
    per_token=(*FIELDS.per_token, "positions_cpu"),
    # Fields of ranks that share out keys: builders derive them again from the lengths, as for drafts.
    dropped=(*FIELDS.dropped, "context_parallel_metadata", "dcp_local_seq_lens", "dcp_local_seq_lens_cpu"),
    derived=("seq_lens_cpu", "_seq_lens_cpu", "num_computed_tokens_cpu", "_num_computed_tokens_cpu"),
    # Prefill context parallelism, and KV caches that are offloaded token by token.
    unsupported=(
        *(name for name in FIELDS.unsupported if name != "dcp_local_seq_lens"),
        "prefill_context_parallel_metadata",  # both, in 0.23.0
        "kvcomp_metadata",  # compressed caches, in 0.23.0
        "req_ids_tensor",
        "token_to_req",
        "req_topk_buffer_slots",
        "req_topk_buffer_active",
        "copy_sfa_draft_index",
    ),
)


class NpuPlatform(Platform):
    """NPUs with vllm-ascend, which is imported only inside calls."""

    has_device = True
    is_proven = True  # on a stand-in for CANN
    notice = "no NPU has run this yet, only a stand-in for CANN"
    # Without attention metadata these return zeros, without an all-reduce.
    copying_modules = (
        "AscendMultiHeadLatentAttention",
        "AscendKimiK3MultiHeadLatentAttention",
        "AscendDeepseekSparseAttention",
    )
    fields: Fields = ASCEND_FIELDS
    sliced_tensors = (*SLICED_CONTEXT_TENSORS, "mc2_mask", "input_ids")  # the last one is in 0.23.0
    pads_batches = True  # all data parallel ranks are padded to the longest batch
    drafts_from_states = True
    supports_dcp = True
    cuts_decodes = True  # each part has fewer queries than the decode

    def check_version(self) -> Decline | None:
        """Return why steps of this vllm-ascend are not proven, or None if they have been compared with unsplit ones."""
        actual = find_release()
        if actual is None:
            return Decline("vllm-ascend is not installed")
        if actual in PROVEN_ON_ASCEND:
            return None
        known = ", ".join(PROVEN_ON_ASCEND)
        return Decline("this version of vllm-ascend is not known to dbo_runtime", f"{actual}; known: {known}")

    def list_unproven(self, vllm_config: VllmConfig) -> Iterator[Decline]:
        """Yield nothing: what was not compared with vllm-ascend is compared in the first steps."""
        return iter(())

    def list_compared(self, vllm_config: VllmConfig) -> Iterator[str]:
        """Yield the architecture, quantized weights, drafter and options that were not compared with vllm-ascend."""
        from dbo_runtime.vllm_plugin.platforms.npu_features import list_unproven

        return list_unproven(vllm_config, _find_proven())

    def cuts_ops(self, vllm_config: VllmConfig) -> bool:
        """Return False if DeepSeek V4's attention takes a chunk of the step's tokens; no nano-batches make that up.

        In vllm-ascend 0.23, layers hand on all tokens in split steps.
        """
        from vllm_ascend.ascend_config import get_ascend_config

        from dbo_runtime.vllm_plugin.platforms.npu_context_parallel import shares_out_tokens
        from dbo_runtime.vllm_plugin.platforms.npu_flashcomm import is_earlier

        is_other = not vllm_config.model_config.architecture.startswith("DeepseekV4For")  # V4.1 is another
        return is_other or not shares_out_tokens() or is_earlier(get_ascend_config())

    def find_stage_buffers(self, model: torch.nn.Module) -> StageBuffers:
        """Return the buffer of keys chosen by sparse attention, where stages hand on its rows."""
        from dbo_runtime.vllm_plugin.platforms.npu_indices import find_stage_buffers

        return find_stage_buffers(model)

    def check_encoder(self, encoder: str) -> Decline | None:
        """Return why a vision encoder of this class is not split unless compared, or None if it was compared here."""
        if encoder in _find_proven().encoders:
            return None
        return Decline("this vision encoder is not proven with vllm-ascend yet", encoder)

    def list_unsupported(self, vllm_config: VllmConfig) -> Iterator[Decline]:
        """Yield each vllm-ascend feature in use that splitting does not support."""
        from dbo_runtime.vllm_plugin.platforms.npu_features import list_unsupported

        return list_unsupported(vllm_config)

    def list_hazards(self, vllm_config: VllmConfig) -> Iterator[tuple[str, str]]:
        """Yield that collectives may wait for cores that MC2's kernels hold."""
        from dbo_runtime.vllm_plugin.platforms.npu_features import list_hazards

        return list_hazards(vllm_config, os.environ)

    def drafts_in_pipeline(self, vllm_config: VllmConfig) -> bool:
        """Return whether this is a prefill node. On others, vllm-ascend's own patch of the scheduler fails."""
        transfer = vllm_config.kv_transfer_config
        return transfer is not None and transfer.kv_role == "kv_producer"

    def choose_dispatch(self, vllm_config: VllmConfig) -> str:
        """Return the dispatch of vllm-ascend's own steps, or `all_to_all` where its shared experts need that."""
        from dbo_runtime.vllm_plugin.platforms.npu_experts import choose_dispatch

        return choose_dispatch(vllm_config)

    def check_step(self, context: ForwardContext, dispatch: str = "all_gather") -> Decline | None:
        """Return why a step is not split: its dispatch to experts, which is equal on all ranks; otherwise None."""
        from dbo_runtime.vllm_plugin.platforms.npu_experts import check_communication

        return check_communication(context, dispatch)

    def prepare_model(self, model: torch.nn.Module) -> None:
        """Divide data that layers share among micro-batches: rotary tables, chosen keys."""
        from dbo_runtime.vllm_plugin.platforms.npu_indices import divide_indices
        from dbo_runtime.vllm_plugin.platforms.npu_rotary import slice_rotary_tables

        slice_rotary_tables(model)
        divide_indices(model)

    def get_unreduced(self, module: Callable[..., Any], parts: Iterable[torch.nn.Module]) -> Callable[..., Any] | None:
        """Return a module with context parallel sparse attention without its reduce."""
        from dbo_runtime.vllm_plugin.platforms.npu_context_parallel import get_unreduced

        return get_unreduced(module, parts)

    def open_device(
        self, process_groups: Sequence[dist.ProcessGroup], config: RuntimeConfig, log: FilteringBoundLogger
    ) -> Device:
        """Open the NPU. Its side lane may be limited to some of its cores."""
        if not config.side_cores:
            return open_device(self.name, groups=process_groups)
        from dbo_runtime.devices.npu import CoreLimit

        return open_device(self.name, groups=process_groups, core_limits={SIDE: CoreLimit(*config.side_cores)})

    def get_encoder_attention(self) -> type[EncoderAttention] | None:
        """Return the encoder attention that takes lengths from the host, if an encoder has run on this release."""
        if not _find_proven().encoders:
            return None
        from dbo_runtime.vllm_plugin.platforms.encoder_attention import NpuAttention

        return NpuAttention

    def split_latent_attention(self, module: torch.nn.Module) -> LatentParts | Decline:
        """Return vllm-ascend's latent attention in parts, or the reason why it stays one op."""
        from dbo_runtime.vllm_plugin.platforms.npu_latent_attention import (
            CLASS,
            AscendLatentAttention,
            check_attention,
        )

        if type(module).__name__ != CLASS:
            return super().split_latent_attention(module)
        declined = check_attention(module)
        return AscendLatentAttention(module) if declined is None else declined

    def get_moe_layer(self, runner: MoERunner) -> MoeLayer:
        """Return the operations of an MoE layer of vllm-ascend, or of vLLM where vllm-ascend uses that."""
        from dbo_runtime.vllm_plugin.platforms.npu_experts import MOE_RUNNERS, AscendMoeLayer
        from dbo_runtime.vllm_plugin.platforms.npu_fused_moe import MOE_CLASSES, AscendFusedMoeLayer

        name = type(runner).__name__
        if name in MOE_CLASSES:
            return AscendFusedMoeLayer(runner)
        return AscendMoeLayer(runner) if name in MOE_RUNNERS else super().get_moe_layer(runner)

    def complete_context(self, part: ForwardContext, piece: BatchSlice, sizes: Sequence[int]) -> None:
        """Set the token counts that vllm-ascend keeps in a slice's forward context."""
        from dbo_runtime.vllm_plugin.platforms.npu_metadata import complete_context

        complete_context(part, piece, sizes)

    def return_context(self, part: ForwardContext, step: ForwardContext) -> None:
        """Restore in a slice's context the kind of communication that vllm-ascend chose for the step."""
        from dbo_runtime.vllm_plugin.platforms.npu_metadata import return_context

        return_context(part, step)

    def find_flashcomm(self, context: ForwardContext) -> FlashComm | None:
        """Return FlashComm as in vllm-ascend 0.23, if the step uses it."""
        from dbo_runtime.vllm_plugin.platforms.npu_flashcomm import find_flashcomm

        return find_flashcomm(context)

    def complete_metadata(self, part: CommonAttentionMetadata, tokens: int) -> CommonAttentionMetadata:
        """Return a slice's common metadata with the lengths and the state that vllm-ascend derives."""
        from dbo_runtime.vllm_plugin.platforms.npu_metadata import complete_metadata

        return complete_metadata(part, self.fields.derived, tokens)

    def get_build_arguments(self, metadata: AttentionMetadata) -> dict[str, Any]:
        """Return build arguments that make ranks with shared-out keys attend in a slice as they do in its step."""
        from dbo_runtime.vllm_plugin.platforms.npu_context_parallel import keep_exchange

        return keep_exchange(metadata)

    def can_cut_requests(self, common: CommonAttentionMetadata, vllm_config: VllmConfig) -> bool:
        """Return whether a request may be cut. Kernels read the cache in a prefill only with chunked prefill."""
        chunks = bool(vllm_config.scheduler_config.enable_chunked_prefill)
        return chunks and super().can_cut_requests(common, vllm_config)

    def building_metadata(self) -> AbstractContextManager[None]:
        """Return a context manager in which builders make new rotary tables."""
        from dbo_runtime.vllm_plugin.platforms.npu_metadata import new_rotary_tables

        return new_rotary_tables()

    def repeating_step(self) -> AbstractContextManager[None]:
        """Return a context manager in which a step does not count the load of experts."""
        from dbo_runtime.vllm_plugin.platforms.npu_experts import without_loads

        return without_loads()


def _find_proven() -> Proven:
    """Return the proven configurations of the installed release; or of the latest known one.

    `check_version` declines an unknown release, except under DBO_CHECK=1.
    """
    return PROVEN_ON_ASCEND.get(find_release() or "", PROVEN_ON_ASCEND[LATEST_ASCEND])


def find_release() -> str | None:
    """Return the installed release of vllm-ascend, or None if there is none."""
    try:
        return version("vllm-ascend")
    except PackageNotFoundError:
        return None
