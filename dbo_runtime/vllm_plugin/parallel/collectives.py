"""How adapters reach the communication of a model served by vLLM."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from vllm import forward_context

from dbo_runtime.decline import DeclineError
from dbo_runtime.dispatch import AllGather, AllToAll, Dispatcher
from dbo_runtime.errors import ProgramError
from dbo_runtime.vllm_plugin.parallel.experts import SplitExperts, check_experts, needs_dispatch
from dbo_runtime.vllm_plugin.parallel.latent_attention import SplitLatentAttention, check_attention, get_latent_module
from dbo_runtime.vllm_plugin.platforms import ascend


class ModelCollectives:
    """The communication of one model, taken out of the modules that make it.

    Record a program first, then `connect`: whether a program can be recorded at all must be the same on every rank
    before they make communicators together.

    Args:
        tensor_parallel: vLLM's coordinator of the group that all-reduces.
        data_parallel: of the group between which tokens travel to experts; None without data parallel.
        dispatch: how they travel, `all_gather` or `all_to_all`.
        exchange_sizes_separately: whether `all_to_all` exchanges sizes in an op of its own. On a device with streams
        the host has
            something to issue meanwhile; on the CPU the lane itself waits, and the tokens leave earlier without.

    Attributes:
        fused_attention_reason: why latent attention was left whole; None if it was not, or nobody asked.
    """

    def __init__(
        self,
        tensor_parallel: Any,
        data_parallel: Any = None,
        dispatch: str = "all_gather",
        exchange_sizes_separately: bool = False,
    ) -> None:
        self._tensor_parallel = tensor_parallel
        self._data_parallel = data_parallel
        self._dispatch = dispatch
        self._exchange_sizes_separately = exchange_sizes_separately
        self.fused_attention_reason: str | None = None
        self._process_group: dist.ProcessGroup | None = None
        self._own_groups: list[dist.ProcessGroup] = []
        self._dispatcher: Dispatcher | None = None
        self._expert_map: torch.Tensor | None = None

    @property
    def reduces(self) -> bool:
        """Whether modules leave a sum to be made.

        One rank alone says yes, too: it runs the schedule of a group, with reduces that do nothing.
        """
        return self._tensor_parallel.world_size > 1 or self._data_parallel is None

    @property
    def process_groups(self) -> list[dist.ProcessGroup]:
        """The communicators of the comm lane, once they are made, and vLLM's own, which ops on `compute` may use."""
        groups = [group for group in (self._tensor_parallel, self._data_parallel) if group is not None]
        return [*self._own_groups, *(group.device_group for group in groups if group.world_size > 1)]

    def connect(self) -> None:
        """Make the communicators of the comm lane. Collective over all ranks.

        They must be its own: those of vLLM's groups stay with whatever runs on the compute lane.
        """
        if self._tensor_parallel.world_size > 1:
            self._process_group = self._tensor_parallel.make_sibling_device_group("dbo")
            self._own_groups.append(self._process_group)
        if self._data_parallel is not None:
            group = self._data_parallel.make_sibling_device_group("dbo_experts")
            self._own_groups.append(group)
            self._dispatcher = (
                AllGather(group) if self._expert_map is None else self._make_all_to_all(self._expert_map, group)
            )

    def decompose(self, experts: Any) -> SplitExperts | None:
        """Return an MoE layer in parts, or None if its tokens stay on their rank and it is run as one op.

        Raises:
            DeclineError: if it cannot be taken apart.
        """
        if not needs_dispatch(experts):
            return None
        find_hazard, parts = check_experts, SplitExperts
        if type(experts).__name__ in ascend.MOE_RUNNERS:
            from dbo_runtime.vllm_plugin.platforms import ascend_experts

            find_hazard, parts = ascend_experts.check_experts, ascend_experts.AscendExperts
        hazard = find_hazard(experts)
        if hazard is not None:
            raise DeclineError(hazard)
        if self._dispatch == "all_gather":
            return parts(experts, self._get_dispatcher, exchanges_sizes=False)
        self._note_placement(experts)
        return parts(experts, self._get_dispatcher, exchanges_sizes=self._exchange_sizes_separately)

    def decompose_attention(self, attention: Any) -> SplitLatentAttention | None:
        """Return latent attention in parts, or None where it stays one op for `fused_attention_reason`."""
        module = get_latent_module(attention)
        if module is None:
            return None
        self.fused_attention_reason = check_attention(module)
        return SplitLatentAttention(module) if self.fused_attention_reason is None else None

    def without_reduce(self, module: Callable[..., Any]) -> Callable[..., Any]:
        """Return *module* without the all-reduce at its end.

        For the time of the call the group's `all_reduce` hands its argument back. That is right only if the module
        returns this very tensor (o_proj, down_proj and the late reduce of the MoE do), or is known to return a copy of
        it; so that is checked each time.
        """
        if self._tensor_parallel.world_size == 1:
            return module
        return functools.partial(self._run_without_reduce, module, _copies_result(module))

    def get_reducing_module(self, fn: Callable[..., Any]) -> Callable[..., Any] | None:
        """Return the module of which `without_reduce` made *fn*; None if it leaves nothing out."""
        is_mine = isinstance(fn, functools.partial) and fn.func == self._run_without_reduce
        return fn.args[0] if is_mine else None  # type: ignore[attr-defined]  # of a partial

    @contextmanager
    def without_reduces(self) -> Iterator[None]:
        """Leave out every reduce of the group meanwhile: for tracing what `without_reduce` runs."""
        self._tensor_parallel.all_reduce = _keep  # shadows the method on this object
        try:
            yield
        finally:
            del self._tensor_parallel.all_reduce

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        """Sum *partial* [tokens, hidden] over the ranks, in place where it is contiguous."""
        if self._process_group is None:
            return partial
        whole = partial.contiguous()
        dist.all_reduce(whole, group=self._process_group)
        return whole

    def _get_dispatcher(self) -> Dispatcher:
        assert self._dispatcher is not None, "connect() comes before the first step"
        return self._dispatcher

    def _note_placement(self, experts: Any) -> None:
        """Remember which experts are here; one table serves all layers."""
        layer = experts.routed_experts
        placed = getattr(layer, "ascend_expert_map", layer.expert_map)
        if placed is None or self._tensor_parallel.world_size > 1:
            raise DeclineError(
                "DBO_DISPATCH=all_to_all needs every expert on one rank: --enable-expert-parallel, no tensor parallel"
            )
        if self._expert_map is not None and not torch.equal(self._expert_map, placed):
            raise DeclineError("DBO_DISPATCH=all_to_all needs all layers' experts on the same ranks")
        self._expert_map = placed

    def _make_all_to_all(self, placed: torch.Tensor, group: dist.ProcessGroup) -> AllToAll:
        here = (placed >= 0).int()
        everywhere = [torch.empty_like(here) for _ in range(dist.get_world_size(group))]
        dist.all_gather(everywhere, here, group=group)
        return AllToAll(group, owners=torch.stack(everywhere).argmax(dim=0))

    def _run_without_reduce(self, module: Callable[..., Any], copies: bool, *args: Any) -> torch.Tensor:
        held: list[torch.Tensor] = []

        def hold(partial: torch.Tensor) -> torch.Tensor:
            held.append(partial)
            return partial

        self._tensor_parallel.all_reduce = hold  # shadows the method on this object; unsplit steps use it as it was
        try:
            result: torch.Tensor = module(*args)
        finally:
            del self._tensor_parallel.all_reduce
        if copies and not held and not forward_context.get_forward_context().attn_metadata:
            return result  # profiling: attention is left out, and what it gives means nothing
        is_reduced = _is_alike if copies else _is_same_memory
        if len(held) != 1 or not is_reduced(result, held[0]):
            raise ProgramError(
                f"{_name(module)} must end in one all-reduce to be run without it; it made {len(held)}"
                f"{' and returned something else' if len(held) == 1 else ''}. Declare it as one op that includes its "
                "reduce, or let the adapter decline this model."
            )
        return result


def _keep(partial: torch.Tensor) -> torch.Tensor:
    return partial


def _copies_result(module: Callable[..., Any]) -> bool:
    """Return whether what a module gives is a copy of what it reduces, and not that itself."""
    called = [module, *getattr(module, "args", ())]
    parts = (part for thing in called if isinstance(thing, torch.nn.Module) for part in thing.modules())
    return any(type(part).__name__ in ascend.COPYING_MODULES for part in parts)


def _is_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype


def _is_same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.numel() == other.numel() and one.dtype == other.dtype


def _name(module: Any) -> str:
    return getattr(getattr(module, "func", module), "__qualname__", type(module).__name__)
