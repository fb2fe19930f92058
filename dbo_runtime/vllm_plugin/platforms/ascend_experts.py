"""vllm-ascend's MoE layer, taken apart at its own seams: router, prepare, dispatcher and experts, finalize.

Read against ops/fused_moe of vllm-ascend 0.30.0rc2. Its prepare and finalize are one object for all layers that keeps
sizes from the one to the other, and all of them reach the ranks through a forward context. Here tokens travel by
`dbo_runtime.dispatch`, which keeps nothing, and between prepare and finalize runs what runs there: the dispatcher that
sorts gathered tokens, the experts, and the sum of each token's.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm import forward_context

from dbo_runtime.dispatch import DispatchedTokens, Routing
from dbo_runtime.vllm_plugin.parallel.experts import SplitExperts
from dbo_runtime.vllm_plugin.platforms import ascend


def check_experts(runner: Any) -> str | None:
    """Return why an MoE layer whose tokens travel cannot be taken apart, or None if it can."""
    routed = runner.routed_experts
    method = type(routed.quant_method).__name__
    if method not in ascend.MOE_METHODS:
        return f"the MoE method {method} cannot be taken apart (known: {', '.join(ascend.MOE_METHODS)})"
    hazards = (
        (runner.gate is None, "does not hold a gate of its own"),
        (runner.routed_input_transform is not None, "transforms tokens before the experts (latent MoE)"),
        (runner.routed_output_transform is not None, "transforms results after the experts (latent MoE)"),
        (routed.apply_router_weight_on_input, "weights tokens before the experts"),
        (runner.moe_config.pcp_size > 1, "is context parallel"),
        (runner.moe_config.is_sequence_parallel, "is sequence parallel"),
        (routed.log2phy is not None, "places experts by load"),
    )
    return next((f"the MoE layer {what}" for found, what in hazards if found), None)


class AscendExperts(SplitExperts):
    """One MoE layer of vllm-ascend in parts."""

    def gate(self, x: torch.Tensor) -> Routing:
        """Choose experts for *x* [tokens, hidden]; the micro-batch's forward context knows the other ranks' sizes."""
        runner = self._runner
        logits = runner._compute_router_logits(x, x)
        weights, ids = runner.routed_experts._select_experts(x, logits, enable_force_load_balance=False)
        sizes = forward_context.get_forward_context().dp_metadata.num_tokens_across_dp_cpu.tolist()
        return self._get_dispatcher().choose_ranks(Routing(weights, ids, tuple(sizes)))

    def shared_experts(self, x: torch.Tensor) -> torch.Tensor:
        """Run the shared experts themselves: beside what, is for the schedule to say."""
        result: torch.Tensor = self._runner.ascend_shared_experts.layer(x)
        return result

    def experts(self, arrived: DispatchedTokens) -> torch.Tensor:
        """Run this rank's experts on what arrived, as after a gather: those of other ranks add nothing."""
        layer = self._runner.routed_experts
        forward_context.get_forward_context().moe_comm_method = ascend.get_gathering(self._runner.moe_config)
        result = layer.quant_method.apply(layer, arrived.x, arrived.weights, arrived.ids, None, None)
        whole: torch.Tensor = result.routed_out
        return whole
