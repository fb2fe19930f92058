"""vllm-ascend's MoE layer, decomposed at its own seams: router, dispatcher, experts.

Read against ops/fused_moe of vllm-ascend 0.30.0rc2. Its prepare and finalize are one object for all layers that keeps
sizes between the two, and reach the other ranks through a forward context. Here `dbo_runtime.engine.dispatch` replaces
them, which keeps no state. What runs between them remains: the dispatcher that sorts gathered tokens, the experts, and
the sum over each token's experts.
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
from dbo_runtime.vllm_plugin.platforms.npu_metadata import GATHERING

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
    from vllm_ascend.ascend_forward_context import MoECommType
    from vllm_ascend.ops.fused_moe.moe_comm_method import FusedExpertsResult, MoECommMethod
    from vllm_ascend.ops.fused_moe.shared_experts import AscendSharedExperts

MOE_RUNNERS = ("AscendMoERunner",)
"""What runs an MoE layer."""

INT8_METHODS = ("AscendW8A8DynamicFusedMoEMethod", "AscendW4A8DynamicFusedMoEMethod")
"""What applies weights to tokens in int8, each with a scale (`npu_dynamic_quant`)."""

MOE_METHODS = ("AscendUnquantizedFusedMoEMethod", *INT8_METHODS)
"""What applies a layer's weights by calling the communication method's experts, and does nothing else."""

EXCHANGING = "ALLTOALL"  # MoE communication that split steps replace, as they do `GATHERING`
FUSED = ("MC2", "FUSED_MC2")  # that is in kernels, and stays
COLLECTS = "eplb_heat_collection_status"  # of a forward context: whether the load of experts is collected in this step
MANY_TOKENS = 1 << 30  # more than MC2 takes


class AlignedTokens:
    """In the place of a method of communication while a router asks it for token ids: they stay."""

    @property
    def prepare_finalize(self) -> AlignedTokens:
        """What gathers, in vllm-ascend's methods."""
        return self

    def all_gather_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return token ids [tokens] as they are."""
        return input_ids

    def pad_and_split_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return token ids [tokens] as they are."""
        return input_ids


class AscendMoeLayer(MoeLayer):
    """The operations of one MoE layer of vllm-ascend."""

    @property
    def has_replicated_shared_experts(self) -> bool:
        """Whether each tensor parallel rank has all of the shared experts (`enable_shared_expert_dp`)."""
        return self.has_shared_experts and bool(self._runner.ascend_shared_experts.weights_replicated)

    @property
    def expert_map(self) -> torch.Tensor | None:
        """The number on this rank of each expert [experts]; see `MoeLayer.expert_map`.

        With expert load balancing it is the map of physical experts: vllm-ascend maps logical ones to them when it
        routes, and keeps this map as the layer was made with it, in order.
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
            (runner.routed_input_transform is not None, "transforms tokens before the experts (latent MoE)"),
            (runner.routed_output_transform is not None, "transforms results after the experts (latent MoE)"),
            (routed.apply_router_weight_on_input, "weights tokens before the experts"),
            (runner.moe_config.pcp_size > 1, "is context parallel"),
        )
        return next((Decline(f"the MoE layer {what}") for is_used, what in checks if is_used), None)

    def choose_experts(
        self, x: torch.Tensor, input_ids: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Route *x* [tokens, hidden] -> weights and ids of experts [tokens, experts per token].

        For experts that are chosen by token ids, vllm-ascend's router gathers or chunks those as its own steps do *x*:
        here they are those of *x* already.
        """
        runner = self._runner
        route = self.get_logits if runner.gate is None else None
        logits = runner._compute_router_logits(x, x) if route is None else route(x)
        if input_ids is not None:
            forward_context.get_forward_context().moe_comm_method = AlignedTokens()
        select = runner.routed_experts._select_experts
        weights, ids = select(x, logits, enable_force_load_balance=False, input_ids=input_ids)
        return weights, ids

    def quantize(self, x: torch.Tensor) -> QuantizedTokens | None:
        """Quantize *x* [tokens, hidden] if its experts take int8: half of bf16's bytes.

        vllm-ascend's all-to-all does so, and its all-gather does after it. Each token is quantized by itself, so
        experts get the same integers.
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
        """Run this rank's experts on dispatched tokens, as after a gather: those of other ranks add nothing."""
        layer = self._runner.routed_experts
        if not arrived.x.shape[0]:  # vllm-ascend's own steps have no such call
            return arrived.x.new_empty(arrived.x.shape, dtype=self._runner.moe_config.in_dtype)
        forward_context.get_forward_context().moe_comm_method = _get_method(GATHERING, self._runner.moe_config)
        layer.ascend_pertoken_scale = arrived.scales  # where vllm-ascend's own `forward_impl` hands it on
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

        vllm-ascend's prepare and finalize chunk and gather tokens, too, and keep sizes between the two: here both are
        left out. A mask keeps padding, up to *rows* rows on each rank, from being sent.
        """
        layer, context = self._runner.routed_experts, forward_context.get_forward_context()
        padding = rows - x.shape[0]
        active, _ = take_chunk(context.mc2_mask[:tokens])
        padded = pad(x, (0, 0, 0, padding))
        weights, ids = self.choose_experts(padded, None if input_ids is None else pad(input_ids, (0, padding)))
        context.moe_comm_type = _select_kind(get_current_vllm_config())
        context.moe_comm_method = _get_method(context.moe_comm_type.name, self._runner.moe_config)
        layer.ascend_mc2_mask = pad(active, (0, padding))  # where vllm-ascend's own `forward_impl` hands it on
        try:
            applied = layer.quant_method.apply(layer, padded, weights, ids, None, None)
        finally:
            layer.ascend_mc2_mask = None
        result: torch.Tensor = applied.routed_out[: x.shape[0]]
        return result

    def _add_load(self, applied: FusedExpertsResult) -> None:
        """Count the rows of each expert, as vllm-ascend's own `forward_impl` does: the sum over a step is the same."""
        layer = self._runner.routed_experts
        if layer.dynamic_eplb and getattr(forward_context.get_forward_context(), COLLECTS, False):
            layer.moe_load.add_(applied.expert_tokens)  # counts, as `GATHERING` gives them

    @property
    def _method(self) -> str:
        """What applies the weights; a wrapper of all quantized methods has it inside."""
        method = self._runner.routed_experts.quant_method
        return type(getattr(method, "quant_method", method)).__name__

    @cached_property
    def _shared_experts(self) -> AscendSharedExperts:
        """The shared experts without a stream and collectives of vllm-ascend's: lanes have their own."""
        from vllm_ascend.ops.fused_moe.shared_experts import SharedExpertParallelMode

        shared = copy(self._runner.ascend_shared_experts)
        shared.multistream_overlap = False
        shared.parallel_mode = lambda: SharedExpertParallelMode.TENSOR_PARALLEL  # others chunk or gather tokens
        return shared


def choose_dispatch(vllm_config: VllmConfig) -> str:
    """Return how tokens reach experts on other ranks: as in vllm-ascend's own steps of many tokens.

    Where it gathers them but each rank has all of the shared experts, only chunks leave nothing to reduce twice: with
    FlashComm tokens are in chunks, otherwise they are by all-to-all. Kernels do it if they do in steps of any size, and
    data parallel ranks then know each other's tokens, which those that decode for others may not.
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
        return "fused"
    exchanges = select_moe_comm_method(MANY_TOKENS, vllm_config).name == EXCHANGING
    needs_chunks = config.enable_shared_expert_dp and not parallel.use_sequence_parallel_moe
    return "all_to_all" if exchanges or needs_chunks else "all_gather"


def check_communication(context: ForwardContext, dispatch: str) -> Decline | None:
    """Return why a step is not split, from what is equal on all ranks: how it dispatches tokens to experts.

    vllm-ascend chooses that by the number of tokens of the unsplit step; *dispatch* is what the program does.
    """
    kind = getattr(getattr(context, "moe_comm_type", None), "name", None)
    if kind is None or kind in (FUSED if dispatch == "fused" else (GATHERING, EXCHANGING)):
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


def _select_kind(vllm_config: VllmConfig) -> MoECommType:
    """Return how vllm-ascend's largest steps communicate with experts: all steps do so, where that is fused."""
    from vllm_ascend.ascend_forward_context import select_moe_comm_method

    return select_moe_comm_method(vllm_config.scheduler_config.max_num_batched_tokens, vllm_config)


def _get_method(kind: str, moe_config: FusedMoEConfig) -> MoECommMethod:
    """Return vllm-ascend's method of that kind, which runs experts: by `GATHERING`, those of one rank on all tokens."""
    from vllm_ascend.ascend_forward_context import MoECommType
    from vllm_ascend.ops.fused_moe.moe_comm_method import get_moe_comm_method

    return get_moe_comm_method(MoECommType[kind], moe_config)
