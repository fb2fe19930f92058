"""A decomposed MoE layer: a platform's operations, with the dispatch of `dbo_runtime.engine.dispatch` between them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from dbo_runtime.engine.dispatch import CombineHandle, DispatchedTokens, Dispatcher, Routing, count_chunk
from dbo_runtime.vllm_plugin.api.forward_context import get_rank_sizes
from dbo_runtime.vllm_plugin.api.moe import MoeLayer, TakeChunk


class SplitExperts:
    """A decomposed MoE layer; see `dbo_runtime.adapters.contract.ExpertParallel`.

    Args:
        layer: the layer's operations.
        get_dispatcher: function that returns the dispatcher, which is made only after programs are recorded.
        exchanges_sizes: whether exchanging sizes is a separate op.
    """

    may_move_to_side = False  # the gate reads the forward context, and vLLM's kernels share a workspace with attention
    is_sequence_parallel = False
    reduces_shared_experts = False
    is_fused = False

    def __init__(self, layer: MoeLayer, get_dispatcher: Callable[[], Dispatcher], exchanges_sizes: bool) -> None:
        self.exchanges_sizes = exchanges_sizes
        self.has_shared_experts = layer.has_shared_experts
        self._layer = layer
        self._get_dispatcher = get_dispatcher

    def gate(self, x: torch.Tensor, tokens: int | None = None, input_ids: torch.Tensor | None = None) -> Routing:
        """Choose experts for *x* [tokens, hidden]. The micro-batch's forward context has other ranks' sizes."""
        return self._route(x, get_rank_sizes(x.shape[0]), input_ids)

    def exchange_sizes(self, routing: Routing) -> Routing:
        """Send every rank the number of rows it will receive."""
        return self._get_dispatcher().exchange_sizes(routing)

    def dispatch(self, x: torch.Tensor, routing: Routing) -> tuple[DispatchedTokens, CombineHandle]:
        """Send *x* [tokens, hidden] to its experts' ranks."""
        return self._get_dispatcher().dispatch(x, routing)

    def shared_experts(self, x: torch.Tensor) -> torch.Tensor:
        """Run the shared experts on *x* [tokens, hidden]."""
        return self._layer.run_shared_experts(x)

    def experts(self, arrived: DispatchedTokens) -> torch.Tensor:
        """Run this rank's experts on dispatched tokens -> [received, hidden]."""
        return self._layer.run_experts(arrived)

    def combine(self, routed: torch.Tensor, back: CombineHandle) -> torch.Tensor:
        """Send results back -> [tokens, hidden]."""
        return self._get_dispatcher().combine(routed, back)

    def merge(self, routed: torch.Tensor, *shared: torch.Tensor) -> torch.Tensor:
        """Add results of the experts and of the shared experts, both [tokens, hidden]."""
        return self._layer.merge(routed, *shared)

    def run_fused(self, x: torch.Tensor, tokens: int, input_ids: torch.Tensor | None = None) -> torch.Tensor:
        """Run the experts of a chunk *x* in one op. Only `FusedExperts` does this."""
        raise AssertionError("`is_fused` is False: its dispatch and combine are ops")

    def _route(self, x: torch.Tensor, sizes: tuple[int, ...], input_ids: torch.Tensor | None) -> Routing:
        """Choose experts and ranks for *x* [tokens, hidden]. *sizes* are the tokens that each rank dispatches."""
        weights, ids = self._layer.choose_experts(x, input_ids)
        latent = self._layer.project(x)
        quantized = self._layer.quantize(x if latent is None else latent)
        return self._get_dispatcher().choose_ranks(Routing(weights, ids, sizes, quantized=quantized, latent=latent))


class SequenceParallelExperts(SplitExperts):
    """An MoE layer whose tensor parallel ranks each dispatch a chunk of the tokens.

    Args:
        layer, get_dispatcher, exchanges_sizes: see `SplitExperts`; tokens are dispatched between all ranks with
            experts.
        ranks: number of ranks that share the tokens.
        take_chunk: function that returns a tensor parallel rank's chunk of per-token rows.
    """

    is_sequence_parallel = True

    def __init__(
        self,
        layer: MoeLayer,
        get_dispatcher: Callable[[], Dispatcher],
        exchanges_sizes: bool,
        ranks: int,
        take_chunk: TakeChunk,
    ) -> None:
        super().__init__(layer, get_dispatcher, exchanges_sizes)
        self.reduces_shared_experts = layer.has_shared_experts and not layer.has_replicated_shared_experts
        self._ranks = ranks
        self._take_chunk = take_chunk

    def gate(self, x: torch.Tensor, tokens: int | None = None, input_ids: torch.Tensor | None = None) -> Routing:
        """Choose experts for a chunk *x* [chunk, hidden] of *tokens* tokens in all."""
        assert tokens is not None, "it has a chunk"
        sizes = [count_chunk(each, self._ranks) for each in get_rank_sizes(tokens) for _ in range(self._ranks)]
        routing = self._route(x, tuple(sizes), input_ids)
        return routing if routing.chosen is None else routing._replace(chosen=self._leave_out(routing.chosen, tokens))

    def _leave_out(self, chosen: torch.Tensor, tokens: int) -> torch.Tensor:
        """Keep this rank's padding from experts, because it would add to their load: *chosen* [chunk, ranks]."""
        if tokens % self._ranks == 0:
            return chosen
        is_token, _ = self._take_chunk(chosen.new_ones(tokens))
        return chosen & is_token[:, None]


class FusedExperts(SequenceParallelExperts):
    """An MoE layer whose kernels dispatch and combine, on their own communicator: see `ExpertParallel.run_fused`.

    Args:
        layer, ranks, take_chunk: see `SequenceParallelExperts`.
    """

    is_fused = True

    def __init__(self, layer: MoeLayer, ranks: int, take_chunk: TakeChunk) -> None:
        super().__init__(layer, _get_none, exchanges_sizes=False, ranks=ranks, take_chunk=take_chunk)

    def run_fused(self, x: torch.Tensor, tokens: int, input_ids: torch.Tensor | None = None) -> torch.Tensor:
        """Route a chunk *x* [chunk, hidden] of *tokens* tokens and run its experts -> [chunk, hidden].

        The kernels take the same number of rows on each rank: that of the largest chunk of any data parallel rank.
        """
        rows = count_chunk(max(get_rank_sizes(tokens)), self._ranks)
        return self._layer.run_fused(x, tokens, rows, self._take_chunk, input_ids)


def _get_none() -> Dispatcher:
    raise AssertionError("`is_fused` is True: its kernels dispatch")
