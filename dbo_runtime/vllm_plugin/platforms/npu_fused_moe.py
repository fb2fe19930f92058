"""The MoE layer of vllm-ascend 0.23.0, whose module holds its runner, decomposed into its own parts.

Read against ops/fused_moe/fused_moe_0_23_0.py of vllm-ascend 0.23.0.post1. There, the code that applies the weights
also routes. Here, routing comes before tokens are dispatched.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from dbo_runtime.decline import Decline
from dbo_runtime.engine.dispatch import DispatchedTokens
from dbo_runtime.vllm_plugin.api.forward_context import get_current
from dbo_runtime.vllm_plugin.api.moe import MoeLayer
from dbo_runtime.vllm_plugin.platforms.npu_experts import MOE_METHODS, AlignedTokens
from dbo_runtime.vllm_plugin.platforms.npu_flashcomm import replicates_shared_experts

if TYPE_CHECKING:
    from vllm_ascend.ops.fused_moe.fused_moe import AscendFusedMoE

MOE_CLASSES = ("AscendFusedMoE",)
"""Modules that hold their runner and compute in its place."""


class AscendFusedMoeLayer(MoeLayer):
    """The operations of an MoE layer of vllm-ascend 0.23.0."""

    def __init__(self, layer: AscendFusedMoE) -> None:
        super().__init__(layer.runner)
        self._layer = layer

    @property
    def has_shared_experts(self) -> bool:
        """Whether some experts run for every token."""
        return self._layer._shared_experts is not None

    @property
    def has_replicated_shared_experts(self) -> bool:
        """Whether each tensor parallel rank holds the shared experts in full, as with FlashComm."""
        from vllm_ascend.ascend_config import get_ascend_config

        return self.has_shared_experts and replicates_shared_experts(get_ascend_config())

    @property
    def expert_map(self) -> torch.Tensor | None:
        """This rank's number for each expert [experts]; see `MoeLayer.expert_map`."""
        placed: torch.Tensor | None = self._layer._expert_map
        return placed

    def check(self) -> Decline | None:
        """Return why a layer that dispatches tokens cannot be decomposed, or None if it can."""
        layer = self._layer
        method = type(getattr(layer.quant_method, "quant_method", layer.quant_method)).__name__
        if method not in MOE_METHODS:
            return Decline("the MoE method cannot be decomposed", f"{method}; known: {', '.join(MOE_METHODS)}")
        checks = (
            ((layer._gate or self.get_logits) is None, "does not hold its gate"),
            (layer._routed_input_transform is not None, "transforms tokens before the experts (latent MoE)"),
            (layer.apply_router_weight_on_input, "weights tokens before the experts"),
            (layer.moe_config.pcp_size > 1, "is context parallel"),
            (layer.log2phy is not None, "places experts by load"),
            (layer.multistream_overlap_gate, "routes on a stream of its own (multistream_overlap_gate)"),
        )
        return next((Decline(f"the MoE layer {what}") for is_used, what in checks if is_used), None)

    def choose_experts(
        self, x: torch.Tensor, input_ids: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Route *x* [tokens, hidden] -> weights and ids of experts [tokens, experts per token].

        Experts that are chosen by token id take the ids from the forward context.
        """
        from vllm_ascend.ops.fused_moe.experts_selector import select_experts

        layer = self._layer
        with _tokens_aligned(input_ids):
            weights, ids = select_experts(
                hidden_states=x,
                router_logits=self._route(x),
                top_k=layer.top_k,
                use_grouped_topk=layer.use_grouped_topk,
                renormalize=layer.renormalize,
                topk_group=layer.topk_group,
                num_expert_group=layer.num_expert_group,
                custom_routing_function=layer.custom_routing_function,
                scoring_func=layer.scoring_func,
                routed_scaling_factor=layer._original_routed_scaling_factor,
                e_score_correction_bias=layer.e_score_correction_bias,
                num_experts=layer.moe_config.num_experts,
                tid2eid=None if input_ids is None else layer.tid2eid,
            )
        return weights, ids

    def run_shared_experts(self, x: torch.Tensor) -> torch.Tensor:
        """Run the shared experts on *x* [tokens, hidden]; the schedule decides what runs concurrently."""
        from vllm_ascend.ops.fused_moe.fused_moe import FusedMoEEvents

        stream = torch.get_device_module(x.device).current_stream()
        started = stream.record_event()  # the wait is on the same stream
        result: torch.Tensor = self._shared_layer._forward_shared_experts(x, FusedMoEEvents(started))
        return result

    def run_experts(self, arrived: DispatchedTokens) -> torch.Tensor:
        """Run this rank's experts on dispatched tokens, as after a gather: experts of other ranks add nothing."""
        layer = self._layer
        rows, experts = arrived.x.shape[0], layer.moe_config.num_experts
        if not rows:  # vllm-ascend's own steps never call with no rows
            return arrived.x.new_empty(arrived.x.shape, dtype=layer.moe_config.in_dtype)

        def get_chosen(**unused: Any) -> tuple[torch.Tensor, torch.Tensor]:
            return arrived.weights, arrived.ids

        applied = layer.quant_method.apply(
            layer=layer,
            x=arrived.x,
            router_logits=arrived.weights.new_zeros(rows, experts),  # only its shape is used
            top_k=layer.top_k,
            renormalize=False,
            use_grouped_topk=False,
            num_experts=experts,
            expert_map=layer._expert_map,
            custom_routing_function=get_chosen,
            activation=layer.activation,
            global_redundant_expert_num=layer.global_redundant_expert_num,
        )
        result: torch.Tensor = applied.routed_out
        return result

    def _route(self, x: torch.Tensor) -> torch.Tensor:
        """Return the router's logits [tokens, experts], in float32 where the layer itself computes them in float32."""
        layer = self._layer
        if layer.is_internal_router:
            return torch.nn.functional.linear(x.float(), layer.gate.weight_fp32)
        logits: torch.Tensor = layer._gate(x)[0] if layer._gate is not None else self._ask_model(x)
        return logits

    def _ask_model(self, x: torch.Tensor) -> torch.Tensor:
        assert self.get_logits is not None, "the layer holds its gate, or the model does"
        return self.get_logits(x)

    @cached_property
    def _shared_layer(self) -> AscendFusedMoE:
        """The layer without vllm-ascend's own stream, because lanes replace it."""
        layer = copy(self._layer)
        layer.multistream_overlap_shared_expert = False
        return layer


@contextmanager
def _tokens_aligned(input_ids: torch.Tensor | None) -> Iterator[None]:
    """Return a context manager in which a router takes *input_ids* [tokens] as they are; without any it takes none."""
    if input_ids is None:
        yield
        return
    context = get_current()
    before = context.input_ids, context.moe_comm_method
    context.input_ids, context.moe_comm_method = input_ids, AlignedTokens()
    try:
        yield
    finally:
        context.input_ids, context.moe_comm_method = before
