"""vllm-ascend's MoE layer, decomposed into its own parts: router, dispatcher, experts.

Read against ops/fused_moe of vllm-ascend 0.30.0rc2. There, all layers share one object for prepare and finalize, which
keeps sizes between the two and communicates through a forward context. `dbo_runtime.engine.dispatch` replaces it and
keeps no state. The code between prepare and finalize remains in use: the dispatcher that sorts gathered tokens, the
experts, and the sum over each token's experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad
from vllm import forward_context
from vllm.config import get_current_vllm_config

from dbo_runtime.decline import Decline
from dbo_runtime.engine.dispatch import DispatchedTokens, QuantizedTokens
from dbo_runtime.vllm_plugin.api.moe import MoeLayer, TakeChunk
from dbo_runtime.vllm_plugin.platforms.npu_flashcomm import has_flashcomm, is_earlier, replicates_shared_experts
from dbo_runtime.vllm_plugin.platforms.npu_metadata import GATHERING

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
    from vllm_ascend.ascend_forward_context import MoECommType
    from vllm_ascend.ops.fused_moe.moe_comm_method import FusedExpertsResult, MoECommMethod
    from vllm_ascend.ops.fused_moe.shared_experts import AscendSharedExperts

MOE_RUNNERS = ("AscendMoERunner",)
"""Classes that run an MoE layer."""

INT8_METHODS = ("AscendW8A8DynamicFusedMoEMethod", "AscendW4A8DynamicFusedMoEMethod")
"""Classes that apply weights to int8 tokens, each with a scale (`npu_dynamic_quant`)."""

MX_METHODS = (
    "AscendW8A8MXFP8DynamicFusedMoEMethod",
    "AscendW4A8MXFPDynamicFusedMoEMethod",
    "AscendW4A4MXFP4DynamicFusedMoEMethod",
)
"""Classes for weights with shared exponents, in the same form. No stand-in runs them: first steps are compared."""

MOE_METHODS = ("AscendUnquantizedFusedMoEMethod", *INT8_METHODS, *MX_METHODS)
"""Classes that apply a layer's weights by calling the communication method's experts, and do nothing else."""

EXCHANGING = "ALLTOALL"  # MoE communication that split steps replace, like `GATHERING`
FUSED_EXPERTS = "FUSED_MC2"  # MoE communication inside kernels with the experts; split steps of 0.23 replace it
FUSED = ("MC2", FUSED_EXPERTS)  # MoE communication inside kernels, which stays
COLLECTS = "eplb_heat_collection_status"  # forward context field: whether this step counts the load of experts
MANY_TOKENS = 1 << 30  # more tokens than MC2 takes


class AlignedTokens:
    """A stand-in for a communication method while a router asks it to align token ids: it leaves them unchanged."""

    @property
    def prepare_finalize(self) -> AlignedTokens:
        """The object that gathers in vllm-ascend's methods."""
        return self

    def all_gather_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the token ids [tokens] unchanged."""
        return input_ids

    def all_gather_input_id_with_dp_group(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the token ids [tokens] unchanged; the method's name in 0.23.0."""
        return input_ids

    def pad_and_split_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the token ids [tokens] unchanged."""
        return input_ids


class AscendMoeLayer(MoeLayer):
    """The operations of a vllm-ascend MoE layer."""

    @property
    def has_replicated_shared_experts(self) -> bool:
        """Whether each tensor parallel rank holds the shared experts in full (`enable_shared_expert_dp`)."""
        return self.has_shared_experts and bool(self._runner.ascend_shared_experts.weights_replicated)

    @property
    def expert_map(self) -> torch.Tensor | None:
        """This rank's number for each expert [experts]; see `MoeLayer.expert_map`.

        With expert load balancing it is the map of physical experts. vllm-ascend maps logical experts to physical ones
        when it routes, and keeps this map as it was when the layer was made, in order.
        """
        routed = self._runner.routed_experts
        placed: torch.Tensor | None = getattr(routed, "ascend_expert_map", routed.expert_map)
        return placed

    @property
    def is_load_balanced(self) -> bool:
        """Whether the router's logical experts are mapped to physical ones (`log2phy`)."""
        return self._runner.routed_experts.log2phy is not None

    def check(self) -> Decline | None:
        """Return why a layer that dispatches tokens cannot be decomposed, or None if it can."""
        runner, routed = self._runner, self._runner.routed_experts
        if self._method not in MOE_METHODS:
            return Decline("the MoE method cannot be decomposed", f"{self._method}; known: {', '.join(MOE_METHODS)}")
        checks = (
            ((runner.gate or self.get_logits) is None, "does not hold its gate"),
            (self._reduces_latent, "reduces the results of a latent MoE before it projects them back"),
            (routed.apply_router_weight_on_input, "weights tokens before the experts"),
            (runner.moe_config.pcp_size > 1, "is context parallel"),
        )
        return next((Decline(f"the MoE layer {what}") for is_used, what in checks if is_used), None)

    def choose_experts(
        self, x: torch.Tensor, input_ids: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Route *x* [tokens, hidden] -> weights and ids of experts [tokens, experts per token].

        For experts chosen by token id, vllm-ascend's router gathers or chunks the ids as its own steps do with *x*.
        Here the ids are already those of *x*.
        """
        runner = self._runner
        route = self.get_logits if runner.gate is None else None
        logits = runner._compute_router_logits(x, x) if route is None else route(x)
        if input_ids is not None:
            forward_context.get_forward_context().moe_comm_method = AlignedTokens()
        select = runner.routed_experts._select_experts
        weights, ids = select(x, logits, enable_force_load_balance=False, input_ids=input_ids)
        return weights, ids

    def project(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return what experts read of *x* [tokens, hidden] in a latent MoE [tokens, latent]; None in any other."""
        transform = self._runner.routed_input_transform
        return None if transform is None else _take_first(transform(x))

    def project_back(self, routed: torch.Tensor) -> torch.Tensor:
        """Return the experts' results [tokens, latent] as hidden states [tokens, hidden]; unchanged if they are."""
        transform = self._runner.routed_output_transform
        return routed if transform is None else _take_first(transform(routed))

    def quantize(self, x: torch.Tensor) -> QuantizedTokens | None:
        """Quantize *x* [tokens, hidden] if its experts take int8, which halves the bytes of bf16.

        vllm-ascend's all-to-all does so before sending; its all-gather quantizes afterwards. Each token is quantized by
        itself, so experts get the same integers.
        """
        if self._method not in INT8_METHODS:
            return None
        from vllm_ascend.device.device_op import DeviceOperator

        return QuantizedTokens(*DeviceOperator.npu_dynamic_quant(x, act_quant_type=torch.int8))

    def run_shared_experts(self, x: torch.Tensor) -> torch.Tensor:
        """Run the shared experts on *x* [tokens, hidden]; the schedule decides what runs concurrently."""
        from vllm_ascend.ops.fused_moe.dataclass.shared_experts import PreparedSharedExpertInput, RoutedMoEMilestones

        result: torch.Tensor = self._shared_experts.forward(PreparedSharedExpertInput(x), RoutedMoEMilestones())
        return result

    def run_experts(self, arrived: DispatchedTokens) -> torch.Tensor:
        """Run this rank's experts on dispatched tokens, as after a gather: experts of other ranks add nothing."""
        layer = self._runner.routed_experts
        if not arrived.x.shape[0]:  # vllm-ascend's own steps never call with no rows
            return arrived.x.new_empty(arrived.x.shape, dtype=self._runner.moe_config.in_dtype)
        forward_context.get_forward_context().moe_comm_method = _get_method(GATHERING, self._runner.moe_config)
        layer.ascend_pertoken_scale = arrived.scales  # same place as in vllm-ascend's own `forward_impl`
        try:
            applied = layer.quant_method.apply(layer, arrived.x, arrived.weights, arrived.ids, None, None)
        finally:
            layer.ascend_pertoken_scale = None
        self._add_load(applied)
        result: torch.Tensor = applied.routed_out
        return result

    def run_fused(
        self, x: torch.Tensor, tokens: int, rows: int, take_chunk: TakeChunk, input_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Route a chunk *x* [chunk, hidden] of *tokens* tokens and run MC2's kernels -> [chunk, hidden].

        vllm-ascend's prepare and finalize also chunk and gather tokens, and keep sizes in between, so both are left out
        here. Each rank pads to *rows* rows. A mask keeps the padding from being sent.
        """
        layer, context = self._runner.routed_experts, forward_context.get_forward_context()
        padding = rows - x.shape[0]
        active, _ = take_chunk(context.mc2_mask[:tokens])
        padded = pad(x, (0, 0, 0, padding))
        weights, ids = self.choose_experts(padded, None if input_ids is None else pad(input_ids, (0, padding)))
        context.moe_comm_type = _select_kind(get_current_vllm_config())
        context.moe_comm_method = _get_method(context.moe_comm_type.name, self._runner.moe_config)
        layer.ascend_mc2_mask = pad(active, (0, padding))  # same place as in vllm-ascend's own `forward_impl`
        latent = self.project(padded)
        try:
            applied = layer.quant_method.apply(layer, padded if latent is None else latent, weights, ids, None, None)
        finally:
            layer.ascend_mc2_mask = None
        result: torch.Tensor = applied.routed_out[: x.shape[0]]
        return result

    def _add_load(self, applied: FusedExpertsResult) -> None:
        """Count the rows of each expert, like vllm-ascend's own `forward_impl`, so that a step's sum is the same."""
        layer = self._runner.routed_experts
        if layer.dynamic_eplb and getattr(forward_context.get_forward_context(), COLLECTS, False):
            layer.moe_load.add_(applied.expert_tokens)  # counts, in the form that `GATHERING` gives

    @property
    def _reduces_latent(self) -> bool:
        """Whether ranks have partial sums of a latent MoE, because each has a part of every expert's weights."""
        config = self._runner.moe_config
        is_latent = self._runner.routed_output_transform is not None
        return is_latent and config.tp_size > 1 and not config.is_sequence_parallel

    @property
    def _method(self) -> str:
        """The class that applies the weights. A wrapper of all quantized methods holds it."""
        method = self._runner.routed_experts.quant_method
        return type(getattr(method, "quant_method", method)).__name__

    @cached_property
    def _shared_experts(self) -> AscendSharedExperts:
        """The shared experts without vllm-ascend's own stream and collectives, because lanes replace them."""
        from vllm_ascend.ops.fused_moe.shared_experts import SharedExpertParallelMode

        shared = copy(self._runner.ascend_shared_experts)
        shared.multistream_overlap = False
        shared.parallel_mode = lambda: SharedExpertParallelMode.TENSOR_PARALLEL  # other modes chunk or gather tokens
        return shared


def choose_dispatch(vllm_config: VllmConfig) -> str:
    """Return how tokens reach experts on other ranks, as in vllm-ascend's own steps of many tokens.

    If vllm-ascend gathers them, but each rank holds the shared experts in full, only chunks avoid a second reduce.
    With FlashComm tokens are already in chunks; otherwise all-to-all makes chunks. Kernels dispatch if they do so for
    steps of any size. Data parallel ranks then know each other's token counts, which nodes that only decode may not.
    """
    parallel = vllm_config.parallel_config
    if not (vllm_config.model_config.is_moe and parallel.enable_expert_parallel):
        return "all_gather"
    from vllm_ascend.ascend_config import get_ascend_config
    from vllm_ascend.ascend_forward_context import select_moe_comm_method
    from vllm_ascend.utils import should_skip_allreduce_across_dp_group

    config = get_ascend_config()
    is_asked_for = config.enable_fused_mc2 or config.enable_prefill_mc2
    is_fused = is_asked_for and _select_kind(vllm_config).name in FUSED
    if is_fused and not should_skip_allreduce_across_dp_group(vllm_config):
        return "all_to_all" if is_earlier(config) else "fused"
    exchanges = select_moe_comm_method(MANY_TOKENS, vllm_config).name == EXCHANGING
    needs_chunks = replicates_shared_experts(config) and not parallel.use_sequence_parallel_moe
    return "all_to_all" if exchanges or needs_chunks else "all_gather"


def check_communication(context: ForwardContext, dispatch: str) -> Decline | None:
    """Return why a step is not split because of its dispatch to experts, which is equal on all ranks; otherwise None.

    vllm-ascend chooses the dispatch by the unsplit step's number of tokens; *dispatch* is the program's.
    """
    kind = getattr(getattr(context, "moe_comm_type", None), "name", None)
    is_replaced = kind in (GATHERING, EXCHANGING)
    if dispatch == "all_to_all" and has_flashcomm(context):
        is_replaced = is_replaced or kind == FUSED_EXPERTS
    if kind is None or (kind in FUSED if dispatch == "fused" else is_replaced):
        return None
    return Decline("MoE communication is fused into its kernels", kind)


@contextmanager
def without_loads() -> Iterator[None]:
    """Return a context manager in which experts do not count their rows."""
    context = forward_context.get_forward_context()
    collects = getattr(context, COLLECTS, False)
    setattr(context, COLLECTS, False)
    try:
        yield
    finally:
        setattr(context, COLLECTS, collects)


def _take_first(result: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return the tensor of a module's result, to which linear layers add their bias."""
    return result[0] if isinstance(result, tuple) else result


def _select_kind(vllm_config: VllmConfig) -> MoECommType:
    """Return how vllm-ascend's largest steps communicate with experts. If that is fused, all steps do the same."""
    from vllm_ascend.ascend_forward_context import select_moe_comm_method

    return select_moe_comm_method(vllm_config.scheduler_config.max_num_batched_tokens, vllm_config)


def _get_method(kind: str, moe_config: FusedMoEConfig) -> MoECommMethod:
    """Return vllm-ascend's method of this kind, which runs experts. `GATHERING` runs a rank's experts on all tokens."""
    from vllm_ascend.ascend_forward_context import MoECommType
    from vllm_ascend.ops.fused_moe.moe_comm_method import get_moe_comm_method

    return get_moe_comm_method(MoECommType[kind], moe_config)
