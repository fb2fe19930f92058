"""The communication of a model served by vLLM, for adapters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from dbo_runtime.adapters.communication import DividedAttention
from dbo_runtime.decline import Decline, DeclineError
from dbo_runtime.engine.dispatch import (
    AllGather,
    AllToAll,
    Dispatcher,
    count_chunk,
    gather_rows,
    pad_chunks,
    reduce_rows,
)
from dbo_runtime.vllm_plugin.api.attention import divide_attention
from dbo_runtime.vllm_plugin.api.forward_context import has_metadata
from dbo_runtime.vllm_plugin.api.groups import make_sibling
from dbo_runtime.vllm_plugin.api.known import REDUCING_NORMS
from dbo_runtime.vllm_plugin.api.latent_attention import LatentParts, get_latent_module
from dbo_runtime.vllm_plugin.api.moe import MoeLayer
from dbo_runtime.vllm_plugin.parallel.experts import FusedExperts, SequenceParallelExperts, SplitExperts
from dbo_runtime.vllm_plugin.parallel.unreduced import check_result, list_modules
from dbo_runtime.vllm_plugin.platforms.platform import Platform

if TYPE_CHECKING:
    from vllm.distributed.parallel_state import GroupCoordinator
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner


class ModelCollectives:
    """A model's communication, separated from the modules that contain it.

    Record a program first, then call `connect`. All ranks must know that the program can be recorded before they make
    communicators together.

    Args:
        platform: the platform that vLLM serves on.
        tensor_parallel: vLLM's coordinator of the group that all-reduces.
        data_parallel: coordinator of the group that dispatches tokens to experts; None without data parallelism.
        dispatch: way to dispatch them, `all_gather`, `all_to_all`, or `fused` into kernels with their own
            communicators.
        expert_parallel: coordinator of all ranks that have experts, if each of them dispatches a chunk of the tokens;
            None if each tensor parallel rank dispatches all its tokens.

    Attributes:
        fused_attention_reason: reason why latent attention stays one op; None if it does not, or the model has none.
    """

    def __init__(
        self,
        platform: Platform,
        tensor_parallel: GroupCoordinator,
        data_parallel: GroupCoordinator | None = None,
        dispatch: str = "all_gather",
        expert_parallel: GroupCoordinator | None = None,
    ) -> None:
        self._platform = platform
        self._tensor_parallel = tensor_parallel
        self._data_parallel = data_parallel
        self._dispatch = dispatch
        self._expert_parallel = expert_parallel
        self.fused_attention_reason: Decline | None = None
        self._process_group: dist.ProcessGroup | None = None
        self._own_groups: list[dist.ProcessGroup] = []
        self._dispatcher: Dispatcher | None = None
        self._expert_map: torch.Tensor | None = None

    @property
    def reduces(self) -> bool:
        """Whether programs have all-reduces. They do even for a single rank, where the all-reduce does nothing."""
        return self._tensor_parallel.world_size > 1 or self._data_parallel is None

    @property
    def process_groups(self) -> list[dist.ProcessGroup]:
        """The comm lane's communicators, once they are made, and vLLM's own, which ops on `compute` may use."""
        groups = [group for group in (self._tensor_parallel, self._data_parallel) if group is not None]
        return [*self._own_groups, *(group.device_group for group in groups if group.world_size > 1)]

    def connect(self) -> None:
        """Make the comm lane's communicators. Collective over all ranks.

        They are separate from the communicators of vLLM's groups, which ops on the compute lane use.
        """
        if self._tensor_parallel.world_size > 1:
            self._process_group = make_sibling(self._tensor_parallel, "dbo")
            self._own_groups.append(self._process_group)
        dispatching = self._expert_parallel or self._data_parallel
        if dispatching is not None and self._dispatch != "fused":
            group = make_sibling(dispatching, "dbo_experts")
            self._own_groups.append(group)
            self._dispatcher = (
                AllGather(group) if self._expert_map is None else self._make_all_to_all(self._expert_map, group)
            )

    def decompose(
        self,
        experts: MoERunner,
        get_logits: Callable[[torch.Tensor], torch.Tensor] | None = None,
        takes_chunks: bool = False,
    ) -> SplitExperts | None:
        """Return a decomposed MoE layer, or None if its tokens stay on their rank, so that it runs as one op.

        *get_logits* returns the router's logits, for experts that do not hold their gate. *takes_chunks* says that the
        adapter also declares the ops of sequence parallel experts.

        Raises:
            DeclineError: the layer cannot be decomposed.
        """
        layer = self._platform.get_moe_layer(experts)
        layer.get_logits = get_logits
        if layer.has_replicated_shared_experts and self._expert_parallel is None:
            raise DeclineError("data parallel shared experts need DBO_DISPATCH=all_to_all")
        has_chunks = self._expert_parallel is not None and (
            self._dispatch in ("all_to_all", "fused") or layer.is_sequence_parallel
        )
        if not layer.needs_dispatch and not has_chunks:
            return None
        decline = layer.check()
        if decline is not None:
            raise DeclineError(decline.reason, decline.detail)
        if self._dispatch == "fused":
            return self._fuse(layer, takes_chunks)
        exchanges_sizes = False
        if self._dispatch == "all_to_all":
            self._note_placement(layer)
            exchanges_sizes = self._platform.exchanges_sizes_separately
        if self._expert_parallel is not None and not takes_chunks:
            reason = "the adapter does not take chunks of tensor parallel ranks"
            raise DeclineError(reason, "set DBO_DISPATCH=all_gather")
        if self._expert_parallel is None:
            return SplitExperts(layer, self._get_dispatcher, exchanges_sizes)
        ranks = self._tensor_parallel.world_size
        return SequenceParallelExperts(layer, self._get_dispatcher, exchanges_sizes, ranks, self.take_chunk)

    def decompose_attention(self, attention: torch.nn.Module) -> LatentParts | None:
        """Return decomposed latent attention, or None if it stays one op because of `fused_attention_reason`."""
        module = get_latent_module(attention)
        if module is None:
            return None
        latent = self._platform.split_latent_attention(module)
        if not isinstance(latent, Decline) and latent.is_gated:
            latent = Decline("the output of latent attention is gated")
        self.fused_attention_reason = latent if isinstance(latent, Decline) else None
        return None if isinstance(latent, Decline) else latent

    def divide_attention(self, attention: torch.nn.Module, attend: Callable[..., Any]) -> DividedAttention | None:
        """Return an attention module in parts; None if it stays one op."""
        module = get_latent_module(attention)
        if module is None:
            return divide_attention(attention, attend)
        latent = self._platform.split_latent_attention(module)
        return None if isinstance(latent, Decline) else latent.divide()

    def without_reduce(self, module: Callable[..., Any]) -> Callable[..., Any]:
        """Return *module* without its final all-reduce.

        During the call, the group's `all_reduce` returns its argument. This is correct only if the module returns that
        same tensor (o_proj, down_proj and the late reduce of the MoE do), or is known to return a copy of it. Each call
        checks this. Norms that sum squares over the ranks still do so, on vLLM's communicator. If a module can reduce
        in several ways, the platform knows how to leave that out.
        """
        if self._tensor_parallel.world_size == 1:
            return module
        parts = list_modules(module)
        unreduced = self._platform.get_unreduced(module, parts)
        if unreduced is not None:
            return unreduced
        classes = {type(part).__name__ for part in parts}
        copies, has_sums = (not classes.isdisjoint(names) for names in (self._platform.copying_modules, REDUCING_NORMS))
        return functools.partial(self._run_without_reduce, module, copies, has_sums)

    def get_reducing_module(self, fn: Callable[..., Any]) -> Callable[..., Any] | None:
        """Return the module that `without_reduce` made *fn* from; None if it was not made by `without_reduce`."""
        if isinstance(fn, functools.partial) and fn.func == self._run_without_reduce:
            module: Callable[..., Any] = fn.args[0]
            return module
        return None

    @contextmanager
    def without_reduces(self) -> Iterator[None]:
        """Return a context manager in which the group does not reduce, to trace functions made by `without_reduce`."""
        self._tensor_parallel.all_reduce = _keep  # shadows the method on this object
        try:
            yield
        finally:
            del self._tensor_parallel.all_reduce

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        """Sum *partial* [tokens, hidden] over the ranks, in place if it is contiguous."""
        if self._process_group is None:
            return partial
        total = partial.contiguous()
        dist.all_reduce(total, group=self._process_group)
        return total

    def take_chunk(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Return this rank's chunk of *x* [tokens, hidden] -> ([chunk, hidden], number of tokens)."""
        group = self._tensor_parallel
        return pad_chunks(x, group.world_size).tensor_split(group.world_size)[group.rank_in_group], x.shape[0]

    def reduce_scatter(self, partial: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Sum *partial* [tokens, hidden] over the ranks -> (this rank's chunk of the sum, number of tokens)."""
        tokens, ranks = partial.shape[0], self._tensor_parallel.world_size
        chunks = [count_chunk(tokens, ranks)] * ranks
        return reduce_rows(pad_chunks(partial, ranks), chunks, self._get_process_group()), tokens

    def all_gather(self, chunk: torch.Tensor, tokens: int) -> torch.Tensor:
        """Gather the chunks of all ranks -> [tokens, hidden]."""
        chunks = [chunk.shape[0]] * self._tensor_parallel.world_size
        return gather_rows(chunk, chunks, self._get_process_group())[:tokens]

    def _fuse(self, layer: MoeLayer, takes_chunks: bool) -> FusedExperts:
        """Return an MoE layer with fused dispatch: ops can hide only tensor parallel communication, not dispatch."""
        if layer.is_load_balanced:
            raise DeclineError("MoE communication is fused into its kernels", "and experts are load balanced")
        if self._expert_parallel is None or not takes_chunks:
            why = "without tensor parallel there is nothing else" if takes_chunks else "the adapter takes no chunks"
            raise DeclineError("MoE communication is fused into its kernels", why)
        return FusedExperts(layer, self._tensor_parallel.world_size, self.take_chunk)

    def _get_dispatcher(self) -> Dispatcher:
        assert self._dispatcher is not None, "connect() comes before the first step"
        return self._dispatcher

    def _get_process_group(self) -> dist.ProcessGroup:
        assert self._process_group is not None, "connect() comes before the first step"
        return self._process_group

    def _note_placement(self, layer: MoeLayer) -> None:
        """Remember which experts are on this rank. One table serves all layers."""
        placed = layer.expert_map
        if placed is None:
            raise DeclineError("DBO_DISPATCH=all_to_all needs every expert on one rank: --enable-expert-parallel")
        if self._expert_map is not None and not torch.equal(self._expert_map, placed):
            raise DeclineError("DBO_DISPATCH=all_to_all needs all layers' experts on the same ranks")
        self._expert_map = placed

    def _make_all_to_all(self, placed: torch.Tensor, group: dist.ProcessGroup) -> AllToAll:
        here = (placed >= 0).int()
        everywhere = [torch.empty_like(here) for _ in range(dist.get_world_size(group))]
        dist.all_gather(everywhere, here, group=group)
        return AllToAll(group, owners=torch.stack(everywhere).argmax(dim=0))

    def _run_without_reduce(self, module: Callable[..., Any], copies: bool, has_sums: bool, *args: Any) -> torch.Tensor:
        held: list[torch.Tensor] = []
        all_reduce: Callable[[torch.Tensor], torch.Tensor] = self._tensor_parallel.all_reduce

        def hold(partial: torch.Tensor) -> torch.Tensor:
            if has_sums and partial.shape != args[-1].shape:  # these are sums of squares, not hidden states
                return all_reduce(partial)
            held.append(partial)
            return partial

        self._tensor_parallel.all_reduce = hold  # shadows the method on this object only for this call
        try:
            result: torch.Tensor = module(*args)
        finally:
            del self._tensor_parallel.all_reduce
        if copies and not held and not has_metadata():
            return result  # profiling skips attention, so its result is meaningless
        check_result(module, result, held, copies)
        return result


def _keep(partial: torch.Tensor) -> torch.Tensor:
    return partial
