"""vLLM's MoE layer, decomposed into its own parts: router, experts, shared experts, and their sum.

Read against fused_moe/runner/moe_runner.py and fused_moe/modular_kernel.py of vLLM 0.28.0 to 0.33.0. vLLM keeps the
shared experts' output in one attribute of the layer. Here it is a value of the micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from dbo_runtime.decline import Decline, DeclineError
from dbo_runtime.engine.dispatch import DispatchedTokens, QuantizedTokens
from dbo_runtime.vllm_plugin.api.known import MOE_METHODS

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEKernelModularImpl
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
    from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduce

MOE_RUNNERS = ("MoERunner",)
"""Classes that run an MoE layer. Only these exact names are known: a subclass may do something else."""

KNOWN_PREPARE_FINALIZE = ("MoEPrepareAndFinalizeNaiveDPEPModular", "MoEPrepareAndFinalizeNoDPEPModular")
"""Prepare and finalize classes that gather tokens and scatter results, or do not, and do nothing else."""

ROUTERS_WITH_OUTPUT = ("ZeroExpertRouter",)
"""Routers that add their own output to the layer's result."""


TakeChunk = Callable[[torch.Tensor], tuple[torch.Tensor, int]]
"""See `Collectives.take_chunk`."""


class MoeLayer:
    """The operations of a vLLM MoE layer.

    Args:
        runner: vLLM's MoE runner.

    Attributes:
        get_logits: function that returns the router's logits [tokens, experts], if the model holds the gate instead of
            the runner.
    """

    def __init__(self, runner: MoERunner) -> None:
        self._runner = runner
        self.get_logits: Callable[[torch.Tensor], torch.Tensor] | None = None

    @property
    def needs_dispatch(self) -> bool:
        """Whether tokens leave their rank, as they do with data parallelism."""
        return bool(self._runner.moe_config.dp_size > 1)

    @property
    def is_sequence_parallel(self) -> bool:
        """Whether vLLM's own layer takes a chunk of the tokens on each tensor parallel rank."""
        return bool(self._runner.moe_config.is_sequence_parallel)

    @property
    def has_shared_experts(self) -> bool:
        """Whether some experts run for every token."""
        return self._runner.shared_experts is not None

    @property
    def has_replicated_shared_experts(self) -> bool:
        """Whether each tensor parallel rank holds the shared experts in full, or a share of their weights."""
        return self.is_sequence_parallel  # vLLM replicates them for chunks of tokens

    @property
    def is_load_balanced(self) -> bool:
        """Whether expert load balancing (EPLB) moves experts. Ids are then of physical experts, which stay in place."""
        return False

    @property
    def expert_map(self) -> torch.Tensor | None:
        """This rank's number for each expert, negative for other ranks' experts [experts]; None without a placement."""
        placed: torch.Tensor | None = self._runner.routed_experts.expert_map
        return placed

    def check(self) -> Decline | None:
        """Return why a layer that dispatches tokens cannot be decomposed, or None if it can."""
        runner = self._runner
        if not hasattr(runner, "routed_experts"):
            return Decline("the MoE layer holds its experts outside of its runner")
        kernel = runner.routed_experts.quant_method.moe_kernel
        impl = getattr(kernel, "impl", None)
        dispatch = type(getattr(impl, "prepare_finalize", None)).__name__
        method = type(runner.routed_experts.quant_method).__name__
        if impl is None or dispatch not in KNOWN_PREPARE_FINALIZE:
            known = ", ".join(KNOWN_PREPARE_FINALIZE)
            return Decline("the MoE dispatch cannot be decomposed", f"{dispatch}; known: {known}")
        if method not in MOE_METHODS:
            return Decline("the MoE method cannot be decomposed", f"{method}; known: {', '.join(MOE_METHODS)}")
        quantized = impl.fused_experts.quant_config.quant_dtype is not None
        checks = (
            (quantized and not impl.fused_experts.expects_unquantized_inputs, "quantizes tokens before it sends them"),
            ((runner.gate or self.get_logits) is None or runner._fse_fuse_gate, "does not hold its gate"),
            (runner.routed_input_transform is not None, "transforms tokens before the experts (latent MoE)"),
            (runner.routed_output_transform is not None, "transforms results after the experts (latent MoE)"),
            (runner.routed_experts.apply_router_weight_on_input, "weights tokens before the experts"),
            (runner.moe_config.hidden_dim != runner.moe_config.hidden_dim_unpadded, "pads its hidden states"),
            (type(runner.router).__name__ in ROUTERS_WITH_OUTPUT, "adds an output of its router"),
            (runner.moe_config.skip_final_all_reduce, "leaves its last all-reduce to the model"),
        )
        return next((Decline(f"the MoE layer {what}") for is_used, what in checks if is_used), None)

    def choose_experts(
        self, x: torch.Tensor, input_ids: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Route *x* [tokens, hidden] -> weights and ids of experts [tokens, experts per token].

        *input_ids* are the token ids [tokens], for models that choose experts by them.
        """
        assert input_ids is None, "only a platform's own layers choose experts by token ids"
        runner = self._runner
        route = self.get_logits if runner.gate is None else None
        logits = runner.gate(x)[0] if route is None else route(x)
        weights, ids = runner.router.select_experts(
            hidden_states=x, router_logits=logits, topk_indices_dtype=runner._quant_method.topk_indices_dtype
        )
        return weights, ids

    def quantize(self, x: torch.Tensor) -> QuantizedTokens | None:
        """Quantize *x* [tokens, hidden] before sending, in the form that experts take; None to send it unquantized."""
        return None

    def project(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return what experts read of *x* [tokens, hidden] in a latent MoE [tokens, latent]; None in any other."""
        return None

    def project_back(self, routed: torch.Tensor) -> torch.Tensor:
        """Return the experts' results [tokens, latent] as hidden states [tokens, hidden]; unchanged if they are."""
        return routed

    def run_shared_experts(self, x: torch.Tensor) -> torch.Tensor:
        """Run the shared experts on *x* [tokens, hidden], bypassing the wrapper that stores their output for later."""
        result: torch.Tensor = self._runner.shared_experts._layer(x)
        return result

    def run_experts(self, arrived: DispatchedTokens) -> torch.Tensor:
        """Run the experts' kernel, which vLLM runs between its prepare and finalize -> [received, hidden]."""
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
            output_alias=torch.empty_like(arrived.x),  # else it may be in a workspace that the next micro-batch reuses
        )
        result: torch.Tensor = _get_weight_and_reduce(impl).apply(
            output=None,
            fused_expert_output=routed,
            topk_weights=arrived.weights,
            topk_ids=arrived.ids,
            apply_router_weight_on_input=False,
        )
        return result

    def run_fused(
        self, x: torch.Tensor, tokens: int, rows: int, take_chunk: TakeChunk, input_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Route a chunk *x* [chunk, hidden] of *tokens* tokens and run kernels that dispatch it -> [chunk, hidden].

        The kernels take *rows* rows on each rank. *take_chunk* takes the same chunk of other per-token data.
        *input_ids* are those of the chunk, as in `choose_experts`.
        """
        raise AssertionError("only a platform that chooses the dispatch `fused` has such kernels")

    def merge(self, routed: torch.Tensor, *shared: torch.Tensor) -> torch.Tensor:
        """Scale the experts' results and add those of the shared experts, as the runner does at its end."""
        _, routed = self._runner._maybe_apply_routed_scale_to_output(*(shared or (None,)), routed)
        routed = self.project_back(routed)
        return shared[0] + routed if shared else routed


def make_moe_layer(experts: MoERunner) -> MoeLayer:
    """Return the operations of a vLLM MoE layer. *experts* is the runner, or holds it, as in vLLM 0.23.

    Raises:
        DeclineError: the class is not known, or its last all-reduce is not its last operation.
    """
    runner = getattr(experts, "runner", experts)
    name = type(runner).__name__
    if name not in MOE_RUNNERS:
        raise DeclineError("the MoE class cannot be decomposed", f"{name}; known: {', '.join(MOE_RUNNERS)}")
    if runner._fused_output_is_reduced:
        raise DeclineError("the MoE kernel reduces its own output")
    return MoeLayer(runner)


def _get_weight_and_reduce(kernel: FusedMoEKernelModularImpl) -> TopKWeightAndReduce:
    """Return the function that sums a token's experts on this rank: the kernel's choice, or vLLM's default."""
    from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
        TopKWeightAndReduceContiguous,
        TopKWeightAndReduceDelegate,
    )

    reduce = kernel.fused_experts.finalize_weight_and_reduce_impl()
    return TopKWeightAndReduceContiguous() if isinstance(reduce, TopKWeightAndReduceDelegate) else reduce
