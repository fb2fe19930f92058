"""vllm-ascend's MoE layer, decomposed at its own seams: router, dispatcher, experts.

Read against ops/fused_moe of vllm-ascend 0.30.0rc2. Its prepare and finalize are one object for all layers that keeps
sizes between the two, and reach the other ranks through a forward context. Here `dbo_runtime.dispatch` replaces them,
which keeps no state. What runs between them remains: the dispatcher that sorts gathered tokens, the experts, and the
sum over each token's experts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from vllm import forward_context

from dbo_runtime.decline import Decline
from dbo_runtime.dispatch import DispatchedTokens
from dbo_runtime.vllm_plugin.api.moe import MoeLayer

if TYPE_CHECKING:
    from vllm.forward_context import ForwardContext
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
    from vllm_ascend.ops.fused_moe.moe_comm_method import MoECommMethod

MOE_RUNNERS = ("AscendMoERunner",)
"""What runs an MoE layer."""

MOE_METHODS = ("AscendUnquantizedFusedMoEMethod",)
"""What applies a layer's weights by calling the communication method's experts, and does nothing else."""

GATHERING, EXCHANGING = "ALLGATHER", "ALLTOALL"  # MoE communication that split steps can replace


class AscendMoeLayer(MoeLayer):
    """The operations of one MoE layer of vllm-ascend."""

    @property
    def expert_map(self) -> torch.Tensor | None:
        """The number on this rank of each expert [experts]; see `MoeLayer.expert_map`."""
        routed = self._runner.routed_experts
        placed: torch.Tensor | None = getattr(routed, "ascend_expert_map", routed.expert_map)
        return placed

    def check(self) -> Decline | None:
        """Return why a layer that dispatches tokens cannot be decomposed, or None if it can."""
        runner, routed = self._runner, self._runner.routed_experts
        method = type(routed.quant_method).__name__
        if method not in MOE_METHODS:
            return Decline("the MoE method cannot be decomposed", f"{method}; known: {', '.join(MOE_METHODS)}")
        checks = (
            (runner.gate is None, "does not hold its gate"),
            (runner.routed_input_transform is not None, "transforms tokens before the experts (latent MoE)"),
            (runner.routed_output_transform is not None, "transforms results after the experts (latent MoE)"),
            (routed.apply_router_weight_on_input, "weights tokens before the experts"),
            (runner.moe_config.pcp_size > 1, "is context parallel"),
            (runner.moe_config.is_sequence_parallel, "is sequence parallel"),
            (routed.log2phy is not None, "places experts by load"),
        )
        return next((Decline(f"the MoE layer {what}") for is_used, what in checks if is_used), None)

    def choose_experts(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Route *x* [tokens, hidden] -> weights and ids of experts [tokens, experts per token]."""
        runner = self._runner
        logits = runner._compute_router_logits(x, x)
        weights, ids = runner.routed_experts._select_experts(x, logits, enable_force_load_balance=False)
        return weights, ids

    def run_shared_experts(self, x: torch.Tensor) -> torch.Tensor:
        """Run the shared experts on *x* [tokens, hidden]; the schedule decides what runs concurrently."""
        result: torch.Tensor = self._runner.ascend_shared_experts.layer(x)
        return result

    def run_experts(self, arrived: DispatchedTokens) -> torch.Tensor:
        """Run this rank's experts on dispatched tokens, as after a gather: those of other ranks add nothing."""
        layer = self._runner.routed_experts
        forward_context.get_forward_context().moe_comm_method = _get_gathering_method(self._runner.moe_config)
        applied = layer.quant_method.apply(layer, arrived.x, arrived.weights, arrived.ids, None, None)
        result: torch.Tensor = applied.routed_out
        return result


def check_communication(context: ForwardContext) -> Decline | None:
    """Return why a step is not split, from what is equal on all ranks: how it dispatches tokens to experts.

    vllm-ascend chooses that by the number of tokens of the unsplit step, and might choose otherwise for a slice of it;
    so all slices keep the step's choice.
    """
    kind = getattr(getattr(context, "moe_comm_type", None), "name", None)
    if kind in (None, GATHERING):
        return None
    if kind == EXCHANGING:
        from vllm.distributed import get_tensor_model_parallel_world_size

        if get_tensor_model_parallel_world_size() == 1:
            return None
        return Decline("experts share tokens out among tensor parallel ranks", kind)
    return Decline("MoE communication is fused into its kernels", kind)


def _get_gathering_method(moe_config: FusedMoEConfig) -> MoECommMethod:
    """Return vllm-ascend's method that runs the experts of one rank on tokens of all ranks."""
    from vllm_ascend.ascend_forward_context import MoECommType
    from vllm_ascend.ops.fused_moe.moe_comm_method import get_moe_comm_method

    return get_moe_comm_method(MoECommType[GATHERING], moe_config)
