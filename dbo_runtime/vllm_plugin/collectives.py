"""How adapters reach tensor parallel communication in vLLM."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from dbo_runtime.errors import ProgramError


class TensorParallel:
    """The all-reduces of one tensor parallel group, taken out of the modules that end in one.

    Args:
        group: vLLM's coordinator of the group.
        process_group: the communicator that the comm lane uses. It must be its own: the one of *group* stays with
            whatever runs on the compute lane.
    """

    def __init__(self, group: Any, process_group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._process_group = process_group

    def without_reduce(self, module: Callable[..., Any]) -> Callable[..., Any]:
        """Return *module* without the all-reduce at its end.

        For the time of the call the group's `all_reduce` hands its argument back. That is right only if the module
        returns this very tensor (o_proj, down_proj and the late reduce of the MoE do), so that is checked each time.
        """
        if self._group.world_size == 1:
            return module
        return functools.partial(self._run_without_reduce, module)

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        """Sum *partial* [tokens, hidden] over the ranks, in place where it is contiguous."""
        if self._process_group is None:
            return partial
        whole = partial.contiguous()
        dist.all_reduce(whole, group=self._process_group)
        return whole

    def _run_without_reduce(self, module: Callable[..., Any], *args: Any) -> torch.Tensor:
        held: list[torch.Tensor] = []

        def hold(partial: torch.Tensor) -> torch.Tensor:
            held.append(partial)
            return partial

        self._group.all_reduce = hold  # shadows the method on this one object, which unsplit steps use as it was
        try:
            result: torch.Tensor = module(*args)
        finally:
            del self._group.all_reduce
        if len(held) != 1 or not _is_same_memory(result, held[0]):
            raise ProgramError(
                f"{_name(module)} must end in one all-reduce to be run without it; it made {len(held)}"
                f"{' and returned something else' if len(held) == 1 else ''}. Declare it as one op that includes its "
                "reduce, or let the adapter decline this model."
            )
        return result


def _is_same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.numel() == other.numel() and one.dtype == other.dtype


def _name(module: Any) -> str:
    return getattr(getattr(module, "func", module), "__qualname__", type(module).__name__)
