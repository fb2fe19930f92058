"""vLLM's MoE layer, taken apart at its own seams: gate, router, prepare, experts, finalize, shared experts.

Read against fused_moe/runner/moe_runner.py and fused_moe/modular_kernel.py of vLLM 0.30.0. vLLM keeps the output of the
shared experts in one slot and reads sizes from the one current forward context; here both are values of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm import forward_context

from dbo_runtime.decline import DeclineError
from dbo_runtime.dispatch import CombineHandle, DispatchedTokens, Dispatcher, Routing
from dbo_runtime.vllm_plugin.api import compat
from dbo_runtime.vllm_plugin.platforms import ascend


def needs_dispatch(runner: Any) -> bool:
    """Return whether tokens of an MoE layer leave their rank. They do under data parallel.

    Raises:
        DeclineError: if it is no MoE layer that we know, or one in which the last all-reduce is not the last step.
    """
    name = type(runner).__name__
    if name not in (*compat.MOE_RUNNERS, *ascend.MOE_RUNNERS):
        raise DeclineError(f"the MoE class {name} is not one that can be taken apart")
    if name in compat.MOE_RUNNERS and runner._fused_output_is_reduced:
        raise DeclineError("the MoE kernel reduces its own output")  # Ascend's does it or not, step by step
    return bool(runner.moe_config.dp_size > 1)


def check_experts(runner: Any) -> str | None:
    """Return why an MoE layer whose tokens travel cannot be taken apart, or None if it can."""
    kernel = runner.routed_experts.quant_method.moe_kernel
    impl: Any = getattr(kernel, "impl", None)
    name = type(getattr(impl, "prepare_finalize", None)).__name__
    if name not in compat.GATHERING_DISPATCH:
        return f"the MoE dispatch {name} cannot be taken apart (known: {', '.join(compat.GATHERING_DISPATCH)})"
    method = type(runner.routed_experts.quant_method).__name__
    if method not in compat.MOE_METHODS:
        return f"the MoE method {method} cannot be taken apart (known: {', '.join(compat.MOE_METHODS)})"
    quantized = impl.fused_experts.quant_config.quant_dtype is not None
    hazards = (
        (quantized and not impl.fused_experts.expects_unquantized_inputs, "quantizes tokens before it sends them"),
        (runner.gate is None or runner._fse_fuse_gate, "does not hold a gate of its own"),
        (runner.routed_input_transform is not None, "transforms tokens before the experts (latent MoE)"),
        (runner.routed_output_transform is not None, "transforms results after the experts (latent MoE)"),
        (runner.routed_experts.apply_router_weight_on_input, "weights tokens before the experts"),
        (runner.moe_config.hidden_dim != runner.moe_config.hidden_dim_unpadded, "pads its hidden states"),
        (type(runner.router).__name__ in compat.ROUTERS_WITH_OUTPUT, "adds an output of its router"),
        (runner.moe_config.is_sequence_parallel, "is sequence parallel"),
        (runner.moe_config.skip_final_all_reduce, "leaves its last all-reduce to the model"),
    )
    return next((f"the MoE layer {what}" for found, what in hazards if found), None)


class SplitExperts:
    """One MoE layer in parts; see `dbo_runtime.adapter.ExpertParallel`.

    Args:
        runner: vLLM's MoE runner.
        get_dispatcher: returns the dispatcher, which is made after programs are recorded.
        exchanges_sizes: whether that is an op of its own.
    """

    def __init__(self, runner: Any, get_dispatcher: Callable[[], Dispatcher], exchanges_sizes: bool) -> None:
        self.exchanges_sizes = exchanges_sizes
        self.has_shared_experts = runner.shared_experts is not None
        self._runner = runner
        self._get_dispatcher = get_dispatcher

    def gate(self, x: torch.Tensor) -> Routing:
        """Choose experts for *x* [tokens, hidden]; the micro-batch's forward context knows the other ranks' sizes."""
        runner = self._runner
        logits, _ = runner.gate(x)
        weights, ids = runner.router.select_experts(
            hidden_states=x, router_logits=logits, topk_indices_dtype=runner._quant_method.topk_indices_dtype
        )
        sizes = forward_context.get_forward_context().dp_metadata.num_tokens_across_dp_cpu.tolist()
        return self._get_dispatcher().choose_ranks(Routing(weights, ids, tuple(sizes)))

    def exchange_sizes(self, routing: Routing) -> Routing:
        """Tell every rank how many rows it will get."""
        return self._get_dispatcher().exchange_sizes(routing)

    def dispatch(self, x: torch.Tensor, routing: Routing) -> tuple[DispatchedTokens, CombineHandle]:
        """Send *x* [tokens, hidden] to its experts' ranks."""
        return self._get_dispatcher().dispatch(x, routing)

    def shared_experts(self, x: torch.Tensor) -> torch.Tensor:
        """Run the shared experts themselves, past the wrapper that keeps their output for later."""
        result: torch.Tensor = self._runner.shared_experts._layer(x)
        return result

    def experts(self, arrived: DispatchedTokens) -> torch.Tensor:
        """Run the kernel of the experts between vLLM's prepare and finalize -> [received, hidden]."""
        layer = self._runner.routed_experts
        impl = layer.quant_method.moe_kernel.impl
        routed = impl._fused_experts(
            in_dtype=arrived.x.dtype,
            a1q=arrived.x,
            a1q_scale=None,
            w1=layer.w13_weight,
            w2=layer.w2_weight,
            topk_weights=arrived.weights,
            topk_ids=arrived.ids,
            activation=layer.activation,
            global_num_experts=layer.global_num_experts,
            local_num_experts=layer.w13_weight.shape[0],
            expert_map=layer.expert_map,
            apply_router_weight_on_input=False,
            expert_tokens_meta=None,
            output_alias=torch.empty_like(arrived.x),  # else it may lie in a workspace that the next micro-batch reuses
        )
        reduce = compat.get_weight_and_reduce(impl)
        result: torch.Tensor = reduce.apply(
            output=None,
            fused_expert_output=routed,
            topk_weights=arrived.weights,
            topk_ids=arrived.ids,
            apply_router_weight_on_input=False,
        )
        return result

    def combine(self, routed: torch.Tensor, back: CombineHandle) -> torch.Tensor:
        """Send results back -> [tokens, hidden]."""
        return self._get_dispatcher().combine(routed, back)

    def merge(self, routed: torch.Tensor, *shared: torch.Tensor) -> torch.Tensor:
        """Scale what the experts gave and add the shared experts, as the runner does at its end."""
        _, routed = self._runner._maybe_apply_routed_scale_to_output(*(shared or (None,)), routed)
        return shared[0] + routed if shared else routed
