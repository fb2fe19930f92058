"""Faults of vLLM 0.30.0's CPU build that expert and data parallel run into, mended where they are found.

Nothing here is part of overlap: the same faults stop an MoE model without us. Each gap names its symptom, and is left
alone where vLLM has closed it.
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from dbo_runtime.dispatch import gather_rows, reduce_rows


@dataclass(frozen=True)
class Gap:
    """A fault of vLLM: what one sees, the version it was seen in, how to find it, and how to mend it."""

    symptom: str
    version: str
    is_open: Callable[[], bool]
    mend: Callable[[], None]


def mend_gaps() -> list[str]:
    """Mend what is broken in this vLLM and return the symptoms. Only for the CPU platform; safe to call again."""
    mended = []
    for gap in GAPS:
        if gap.is_open():
            gap.mend()
            mended.append(gap.symptom)
    return mended


def _experts_class() -> Any:
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    return CPUUnquantizedExperts


def _ignores_expert_map() -> bool:
    """Return whether the experts' `apply` never reads the `expert_map` that it is given."""
    code = dis.get_instructions(_experts_class().apply)
    return not any(step.opname.startswith("LOAD_FAST") and "expert_map" in str(step.argval) for step in code)


def _map_experts() -> None:
    """Translate global expert numbers before the kernel sees them; experts of other ranks get weight 0."""
    experts = _experts_class()
    apply = experts.apply

    @functools.wraps(apply)
    def apply_mapped(self: Any, *args: Any, expert_map: torch.Tensor | None, **kwargs: Any) -> None:
        if expert_map is not None:
            ids = kwargs["topk_ids"]
            local = expert_map[ids.long()]
            elsewhere = local < 0
            kwargs["topk_ids"] = local.masked_fill(elsewhere, 0).to(ids.dtype)
            kwargs["topk_weights"] = kwargs["topk_weights"].masked_fill(elsewhere, 0.0)
        apply(self, *args, expert_map=None, **kwargs)

    experts.apply = apply_mapped


def _communicator_class() -> Any:
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    return CpuCommunicator


def _lacks_uneven_collectives() -> bool:
    """Return whether the CPU communicator leaves `all_gatherv` to its base class, which raises NotImplementedError."""
    communicator = _communicator_class()
    return "all_gatherv" not in vars(communicator) or "reduce_scatterv" not in vars(communicator)


def _add_uneven_collectives() -> None:
    def all_gatherv(
        self: Any, input_: torch.Tensor | list[torch.Tensor], dim: int = 0, sizes: list[int] | None = None
    ) -> torch.Tensor | list[torch.Tensor]:
        """Gather rows of all ranks [sum of sizes, ...]."""
        if isinstance(input_, list):
            return [_gather(self, one, dim, sizes) for one in input_]
        return _gather(self, input_, dim, sizes)

    def reduce_scatterv(self: Any, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None) -> torch.Tensor:
        """Sum over the ranks and return this rank's rows."""
        _check_first(dim)
        even = [input_.shape[0] // self.world_size] * self.world_size
        return reduce_rows(input_, sizes or even, self.device_group)

    communicator = _communicator_class()
    communicator.all_gatherv, communicator.reduce_scatterv = all_gatherv, reduce_scatterv


def _gather(communicator: Any, x: torch.Tensor, dim: int, sizes: list[int] | None) -> torch.Tensor:
    _check_first(dim)
    group: dist.ProcessGroup = communicator.device_group
    return gather_rows(x, sizes or [x.shape[0]] * communicator.world_size, group)


def _check_first(dim: int) -> None:
    if dim != 0:
        raise NotImplementedError(f"rows are gathered and scattered along dimension 0 only, not {dim}.")


GAPS = (
    Gap(
        symptom="expert parallel on CPU ends in a segmentation fault: expert_map is ignored",
        version="0.30.0",
        is_open=_ignores_expert_map,
        mend=_map_experts,
    ),
    Gap(
        symptom="data parallel MoE on CPU ends in NotImplementedError: no all_gatherv and reduce_scatterv",
        version="0.30.0",
        is_open=_lacks_uneven_collectives,
        mend=_add_uneven_collectives,
    ),
)
