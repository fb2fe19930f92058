"""One MoE layer in parts: a platform's operations, with the dispatch of `dbo_runtime.dispatch` between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from dbo_runtime.dispatch import (
    CombineHandle,
    DispatchedTokens,
    Dispatcher,
    QuantizedTokens,
    Routing,
    gather_rows,
    reduce_rows,
)
from dbo_runtime.errors import ProgramError
from dbo_runtime.vllm_plugin.api.forward_context import get_rank_sizes
from dbo_runtime.vllm_plugin.api.moe import MoeLayer

if TYPE_CHECKING:
    from vllm.distributed.parallel_state import GroupCoordinator


class SplitExperts:
    """One MoE layer in parts; see `dbo_runtime.adapter.ExpertParallel`.

    Args:
        layer: its operations.
        get_dispatcher: returns the dispatcher, which is made after programs are recorded.
        exchanges_sizes: whether that is an op of its own.
    """

    is_movable = False  # the gate reads the forward context, and vLLM's kernels share one workspace with attention
    is_sequence_parallel = False
    reduces_shared_experts = False

    def __init__(self, layer: MoeLayer, get_dispatcher: Callable[[], Dispatcher], exchanges_sizes: bool) -> None:
        self.exchanges_sizes = exchanges_sizes
        self.has_shared_experts = layer.has_shared_experts
        self._layer = layer
        self._get_dispatcher = get_dispatcher

    def gate(self, x: torch.Tensor) -> Routing:
        """Choose experts for *x* [tokens, hidden]; the micro-batch's forward context has the other ranks' sizes."""
        return self._route(x, get_rank_sizes(x.shape[0]))

    def exchange_sizes(self, routing: Routing) -> Routing:
        """Send every rank the number of rows that it will receive."""
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

    def reduce_scatter(self, partial: torch.Tensor) -> torch.Tensor:
        """Raise ProgramError: only sequence-parallel parts have chunks."""
        raise ProgramError("declare no op of reduce_scatter() unless reduces_shared_experts.")

    def all_gather(self, chunk: torch.Tensor, handle: CombineHandle) -> torch.Tensor:
        """Raise ProgramError: only sequence-parallel parts have chunks."""
        raise ProgramError("declare no op of all_gather() unless is_sequence_parallel.")

    def _route(self, x: torch.Tensor, sizes: tuple[int, ...]) -> Routing:
        """Choose experts and ranks for *x* [tokens, hidden]; *sizes* are the tokens that each rank dispatches."""
        if not x.shape[0]:
            return self._route_nothing(x, sizes)
        weights, ids = self._layer.choose_experts(x)
        return self._get_dispatcher().choose_ranks(Routing(weights, ids, sizes, quantized=self._layer.quantize(x)))

    def _route_nothing(self, x: torch.Tensor, sizes: tuple[int, ...]) -> Routing:
        """Return the routing of no token: routers of vLLM cannot make it, so it is cut off that of one."""
        one = x.new_zeros(1, *x.shape[1:])
        weights, ids = self._layer.choose_experts(one)
        quantized = self._layer.quantize(one)
        if quantized is not None:
            quantized = QuantizedTokens(quantized.x[:0], quantized.scales[:0])
        return self._get_dispatcher().choose_ranks(Routing(weights[:0], ids[:0], sizes, quantized=quantized))


class SequenceParallelExperts(SplitExperts):
    """An MoE layer whose tensor parallel ranks each dispatch a chunk of the tokens, which all of them have.

    Args:
        layer, get_dispatcher, exchanges_sizes: as above; tokens are dispatched between all ranks that have experts.
        tensor_parallel, expert_parallel: vLLM's coordinators of the ranks with the same tokens, and of all.
        get_process_group: returns their communicator on the comm lane.
    """

    is_sequence_parallel = True

    def __init__(
        self,
        layer: MoeLayer,
        get_dispatcher: Callable[[], Dispatcher],
        exchanges_sizes: bool,
        tensor_parallel: GroupCoordinator,
        expert_parallel: GroupCoordinator,
        get_process_group: Callable[[], dist.ProcessGroup],
    ) -> None:
        super().__init__(layer, get_dispatcher, exchanges_sizes)
        self.reduces_shared_experts = layer.has_shared_experts and not layer.has_replicated_shared_experts
        self._ranks = tensor_parallel.world_size
        self._rank = tensor_parallel.rank_in_group
        first = expert_parallel.rank_in_group - self._rank
        self._peers = slice(first, first + self._ranks)  # the ranks with the same tokens, among all of them
        self._get_process_group = get_process_group

    def gate(self, x: torch.Tensor) -> Routing:
        """Choose experts for this rank's chunk of *x* [tokens, hidden]."""
        sizes = [chunk for tokens in get_rank_sizes(x.shape[0]) for chunk in self._list_chunks(tokens)]
        return self._route(self._take_chunk(x), tuple(sizes))

    def dispatch(self, x: torch.Tensor, routing: Routing) -> tuple[DispatchedTokens, CombineHandle]:
        """Send this rank's chunk of *x* [tokens, hidden] to its experts' ranks."""
        return super().dispatch(self._take_chunk(x), routing)

    def shared_experts(self, x: torch.Tensor) -> torch.Tensor:
        """Run the shared experts on *x* [tokens, hidden], or on the chunk of it if this rank has all of them."""
        if self.reduces_shared_experts:
            return super().shared_experts(x)
        chunk = self._take_chunk(x)
        return super().shared_experts(chunk) if chunk.shape[0] else chunk

    def reduce_scatter(self, partial: torch.Tensor) -> torch.Tensor:
        """Sum *partial* [tokens, hidden] over the ranks, for this rank's chunk."""
        return reduce_rows(partial, self._list_chunks(partial.shape[0]), self._get_process_group())

    def all_gather(self, chunk: torch.Tensor, handle: CombineHandle) -> torch.Tensor:
        """Return the tokens of all chunks."""
        return gather_rows(chunk, handle.sizes[self._peers], self._get_process_group())

    def _take_chunk(self, x: torch.Tensor) -> torch.Tensor:
        chunk: torch.Tensor = x.tensor_split(self._ranks)[self._rank]
        return chunk

    def _list_chunks(self, tokens: int) -> list[int]:
        """Return how many tokens of a micro-batch each rank dispatches: the first ones one more, as tensor_split."""
        return [tokens // self._ranks + (rank < tokens % self._ranks) for rank in range(self._ranks)]
