"""Faults of vLLM 0.30.0's CPU build that expert, data and pipeline parallel run into, mended where they are found.

Nothing here is part of overlap: the same faults stop a model without us. Each gap names its symptom, and is left
alone where vLLM has closed it.
"""

from __future__ import annotations

import dis
import functools
import inspect
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


def apply_patches() -> list[str]:
    """Mend what is broken in this vLLM and return the symptoms. Only for the CPU platform; safe to call again."""
    mended = []
    for gap in GAPS:
        if gap.is_open():
            gap.mend()
            mended.append(gap.symptom)
    return mended


def _find_blind_experts() -> list[Any]:
    """Return the expert kernels whose `apply` never reads the `expert_map` that it is given."""
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe
    from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEExpertsModular

    own = [kind for kind in vars(cpu_moe).values() if inspect.isclass(kind) and kind.__module__ == cpu_moe.__name__]
    kernels: list[Any] = [kind for kind in own if issubclass(kind, FusedMoEExpertsModular) and "apply" in vars(kind)]
    return [kind for kind in kernels if not _reads(kind.apply, "expert_map")]


def _reads(function: Any, argument: str) -> bool:
    """Look into the bytecode: to try it out would be the segmentation fault. One instruction may load two names."""
    steps = dis.get_instructions(function)
    return any(step.opname.startswith("LOAD_") and argument in str(step.argval) for step in steps)


def _map_experts() -> None:
    for kernel in _find_blind_experts():
        kernel.apply = _run_experts_here(kernel.apply)


def _run_experts_here(apply: Callable[..., None]) -> Callable[..., None]:
    """Give the kernel only the (token, expert) pairs whose expert is here, with its number on this rank."""

    @functools.wraps(apply)
    def run(
        self: Any,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: Any,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        common = (activation, global_num_experts, None)
        if expert_map is None:
            apply(self, output, hidden_states, w1, w2, topk_weights, topk_ids, *common, *args, **kwargs)
            return
        here = expert_map[topk_ids.long()]
        tokens, slots = (here >= 0).nonzero(as_tuple=True)
        ids = here[tokens, slots, None].to(topk_ids.dtype)
        pairs = torch.empty((len(tokens), output.shape[1]), dtype=output.dtype)
        if len(tokens):
            weights = topk_weights[tokens, slots, None]
            apply(self, pairs, hidden_states[tokens], w1, w2, weights, ids, *common, *args, **kwargs)
        output.copy_(torch.zeros(output.shape).index_add_(0, tokens, pairs.float()))

    return run


def _traces_experts() -> bool:
    """Return whether the MoE runner makes a case of the CPU, where it lets torch.compile look into the layer."""
    return "is_cpu" in _runner_class()._select_forward.__code__.co_names


def _hide_experts() -> None:
    """Call the layer as one opaque op, as on other platforms, where sizes or experts depend on data."""
    runner = _runner_class()
    select = runner._select_forward

    @functools.wraps(select)
    def select_forward(self: Any) -> Any:
        if self.moe_config.dp_size == 1 and self.moe_config.ep_size == 1:
            return select(self)
        return torch.ops.vllm.moe_forward if self._shared_experts is None else torch.ops.vllm.moe_forward_shared

    runner._select_forward = select_forward


def _runner_class() -> Any:
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    return MoERunner


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


def _lacks_stage_buffers() -> bool:
    """Return whether only dummy runs make what a later stage receives into: an eager start on CPU has none."""
    sync = _stage_runner_class().sync_and_gather_intermediate_tensors
    return "make_empty_intermediate_tensors" not in sync.__code__.co_names


def _make_stage_buffers() -> None:
    runner = _stage_runner_class()
    sync = runner.sync_and_gather_intermediate_tensors

    @functools.wraps(sync)
    def make_and_sync(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.intermediate_tensors is None:
            self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
                batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )
        return sync(self, *args, **kwargs)

    runner.sync_and_gather_intermediate_tensors = make_and_sync


def _stage_runner_class() -> Any:
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    return CPUModelRunner


GAPS = (
    Gap(
        symptom="expert parallel on CPU ends in a segmentation fault: expert_map is ignored",
        version="0.30.0",
        is_open=lambda: bool(_find_blind_experts()),
        mend=_map_experts,
    ),
    Gap(
        symptom="data parallel MoE on CPU ends in NotImplementedError: no all_gatherv and reduce_scatterv",
        version="0.30.0",
        is_open=_lacks_uneven_collectives,
        mend=_add_uneven_collectives,
    ),
    Gap(
        symptom="torch.compile of a data parallel MoE fails on CPU: it is traced, and its sizes depend on data",
        version="0.30.0",
        is_open=_traces_experts,
        mend=_hide_experts,
    ),
    Gap(
        symptom="an eager start of pipeline parallel on CPU ends in AssertionError: later stages have no buffers",
        version="0.30.0",
        is_open=_lacks_stage_buffers,
        mend=_make_stage_buffers,
    ),
)
