"""Patch upstream bugs of vLLM's CPU build that break all kinds of parallelism, speculative decoding, or LoRA.

None of this is part of overlap: the same bugs break a model without this package. Each entry of `UPSTREAM_BUGS` has a
symptom and a test for the bug. A vLLM that has fixed the bug is not patched.
"""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from dbo_runtime.engine.dispatch import gather_rows, reduce_rows
from dbo_runtime.vllm_plugin.platforms.cpu_draft_kernels import find_triton_dispatchers, set_cpu_kernels

if TYPE_CHECKING:
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEExpertsModular
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
    from vllm.sequence import IntermediateTensors
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner


@dataclass(frozen=True)
class UpstreamBug:
    """A bug of vLLM: its symptom, versions known to have it, a test for it, and its patch."""

    symptom: str
    versions: tuple[str, ...]
    is_present: Callable[[], bool]
    patch: Callable[[], None]


def apply_patches() -> tuple[list[str], dict[str, str]]:
    """Patch the bugs that this vLLM has. Only for the CPU platform. Safe to call repeatedly.

    Returns:
        The symptoms of the patched bugs; and, with the reason, of bugs that could not be patched. Another vLLM version
        may have other names, and may not need the patch.
    """
    patched: list[str] = []
    failed: dict[str, str] = {}
    for bug in UPSTREAM_BUGS:
        try:
            if bug.is_present():
                bug.patch()
                patched.append(bug.symptom)
        except Exception as error:  # noqa: BLE001 - the engine starts without the patch
            failed[bug.symptom] = repr(error)
    return patched, failed


def _find_mapless_experts() -> list[type[FusedMoEExpertsModular]]:
    """Return the expert kernels whose `apply` never reads its argument `expert_map`."""
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe
    from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEExpertsModular

    own = [kind for kind in vars(cpu_moe).values() if inspect.isclass(kind) and kind.__module__ == cpu_moe.__name__]
    kernels: list[type[FusedMoEExpertsModular]] = [
        kind for kind in own if issubclass(kind, FusedMoEExpertsModular) and "apply" in vars(kind)
    ]
    return [kind for kind in kernels if not _reads(kind.apply, "expert_map")]


def _reads(function: Callable[..., object], argument: str) -> bool:
    """Inspect the bytecode, because a call would be the segmentation fault. One instruction may load two names."""
    codes = dis.get_instructions(function)
    return any(code.opname.startswith("LOAD_") and argument in str(code.argval) for code in codes)


def _map_experts() -> None:
    for kernel in _find_mapless_experts():
        kernel.apply = _run_local_experts(kernel.apply)


def _run_local_experts(apply: Callable[..., None]) -> Callable[..., None]:
    """Call the kernel only with the (token, expert) pairs of experts on this rank, by their local numbers."""

    @functools.wraps(apply)
    def run(
        self: FusedMoEExpertsModular,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: MoEActivation,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        common = (activation, global_num_experts, None)
        if expert_map is None:
            apply(self, output, hidden_states, w1, w2, topk_weights, topk_ids, *common, *args, **kwargs)
            return
        local = expert_map[topk_ids.long()]
        tokens, slots = (local >= 0).nonzero(as_tuple=True)
        ids = local[tokens, slots, None].to(topk_ids.dtype)
        pairs = torch.empty((len(tokens), output.shape[1]), dtype=output.dtype)
        if len(tokens):
            weights = topk_weights[tokens, slots, None]
            apply(self, pairs, hidden_states[tokens], w1, w2, weights, ids, *common, *args, **kwargs)
        output.copy_(torch.zeros(output.shape).index_add_(0, tokens, pairs.float()))

    return run


def _traces_experts() -> bool:
    """Return whether the MoE runner treats the CPU differently and lets torch.compile trace the layer."""
    return "is_cpu" in _get_moe_runner()._select_forward.__code__.co_names


def _hide_experts() -> None:
    """Call the layer as one opaque op, as on other platforms, if sizes or experts depend on data."""
    runner = _get_moe_runner()
    select: Callable[[MoERunner], Callable[..., torch.Tensor]] = runner._select_forward

    @functools.wraps(select)
    def select_forward(self: MoERunner) -> Callable[..., torch.Tensor]:
        if self.moe_config.dp_size == 1 and self.moe_config.ep_size == 1:
            return select(self)
        ops = torch.ops.vllm
        run: Callable[..., torch.Tensor] = ops.moe_forward if self._shared_experts is None else ops.moe_forward_shared
        return run

    runner._select_forward = select_forward


def _get_moe_runner() -> type[MoERunner]:
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    kind: type[MoERunner] = MoERunner
    return kind


def _get_communicator() -> type[CpuCommunicator]:
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    kind: type[CpuCommunicator] = CpuCommunicator
    return kind


def _lacks_uneven_collectives() -> bool:
    """Return whether the CPU communicator inherits its base class's `all_gatherv`, which raises NotImplementedError."""
    communicator = _get_communicator()
    return "all_gatherv" not in vars(communicator) or "reduce_scatterv" not in vars(communicator)


def _add_uneven_collectives() -> None:
    def all_gatherv(
        self: CpuCommunicator, input_: torch.Tensor | list[torch.Tensor], dim: int = 0, sizes: list[int] | None = None
    ) -> torch.Tensor | list[torch.Tensor]:
        """Gather the rows of all ranks [sum of sizes, ...]."""
        if isinstance(input_, list):
            return [_gather(self, one, dim, sizes) for one in input_]
        return _gather(self, input_, dim, sizes)

    def reduce_scatterv(
        self: CpuCommunicator, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None
    ) -> torch.Tensor:
        """Sum over the ranks and return this rank's rows."""
        _check_first(dim)
        even = [input_.shape[0] // self.world_size] * self.world_size
        return reduce_rows(input_, sizes or even, self.device_group)

    communicator = _get_communicator()
    communicator.all_gatherv, communicator.reduce_scatterv = all_gatherv, reduce_scatterv


def _gather(communicator: CpuCommunicator, x: torch.Tensor, dim: int, sizes: list[int] | None) -> torch.Tensor:
    _check_first(dim)
    group: dist.ProcessGroup = communicator.device_group
    return gather_rows(x, sizes or [x.shape[0]] * communicator.world_size, group)


def _check_first(dim: int) -> None:
    if dim != 0:
        raise NotImplementedError(f"rows are gathered and scattered along dimension 0 only, not {dim}.")


def _lacks_stage_buffers() -> bool:
    """Return whether only dummy runs make a later stage's receive buffers. An eager start on CPU has no dummy run."""
    sync = _get_model_runner().sync_and_gather_intermediate_tensors
    return "make_empty_intermediate_tensors" not in sync.__code__.co_names


def _make_stage_buffers() -> None:
    runner = _get_model_runner()
    sync = runner.sync_and_gather_intermediate_tensors

    @functools.wraps(sync)
    def make_and_sync(self: CPUModelRunner, *args: Any, **kwargs: Any) -> IntermediateTensors:
        if self.intermediate_tensors is None:
            self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
                batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )
        return sync(self, *args, **kwargs)

    runner.sync_and_gather_intermediate_tensors = make_and_sync


def _get_model_runner() -> type[CPUModelRunner]:
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    kind: type[CPUModelRunner] = CPUModelRunner
    return kind


def _gives_adapters_to_all() -> bool:
    """Return whether a token without an adapter, whose index is -1, gets the adapter of the last slot."""
    output = torch.zeros(1, 1)
    _get_lora_ops().bgmv_expand(torch.ones(1, 1), torch.ones(2, 1, 1), output, torch.tensor([-1]))
    return bool(output.any())


def _skip_tokens_without_adapters() -> None:
    """Expand zeros for tokens without an adapter, as vLLM's PR #48421 does. Other platforms' kernels skip them."""
    from vllm.lora.punica_wrapper import punica_cpu

    ops = _get_lora_ops()
    for name in ("bgmv_expand", "bgmv_expand_slice"):
        patched = _hide_unmapped(getattr(ops, name))
        setattr(ops, name, patched)  # the kernels for prefills call these names
        setattr(punica_cpu, name, patched)


def _hide_unmapped(expand: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(expand)
    def run(
        inputs: torch.Tensor, weights: torch.Tensor, output: torch.Tensor, indices: torch.Tensor, *args: Any, **kw: Any
    ) -> None:
        expand(inputs.masked_fill((indices < 0)[:, None], 0.0), weights, output, indices, *args, **kw)

    return run


def _get_lora_ops() -> ModuleType:
    return import_module("vllm.lora.ops.torch_ops.lora_ops")


UPSTREAM_BUGS = (
    UpstreamBug(
        symptom="expert parallel on CPU ends in a segmentation fault: expert_map is ignored",
        versions=("0.30.0", "0.32.0"),
        is_present=lambda: bool(_find_mapless_experts()),
        patch=_map_experts,
    ),
    UpstreamBug(
        symptom="data parallel MoE on CPU ends in NotImplementedError: no all_gatherv and reduce_scatterv",
        versions=("0.23.0", "0.28.0", "0.30.0", "0.32.0"),
        is_present=_lacks_uneven_collectives,
        patch=_add_uneven_collectives,
    ),
    UpstreamBug(
        symptom="torch.compile of a data parallel MoE fails on CPU: it is traced, and its sizes depend on data",
        versions=("0.23.0", "0.28.0", "0.30.0", "0.32.0"),
        is_present=_traces_experts,
        patch=_hide_experts,
    ),
    UpstreamBug(
        symptom="an eager start of pipeline parallel on CPU ends in AssertionError: later stages have no buffers",
        versions=("0.23.0", "0.28.0", "0.30.0", "0.32.0"),
        is_present=_lacks_stage_buffers,
        patch=_make_stage_buffers,
    ),
    UpstreamBug(
        symptom="speculative decoding on CPU ends in TypeError: dispatchers are left on Triton's kernels",
        versions=("0.30.0",),
        is_present=lambda: bool(find_triton_dispatchers()),
        patch=set_cpu_kernels,
    ),
    UpstreamBug(
        symptom="requests without a LoRA adapter are answered with one on CPU, in steps with requests that have one",
        versions=("0.23.0", "0.28.0", "0.30.0", "0.32.0"),
        is_present=_gives_adapters_to_all,
        patch=_skip_tokens_without_adapters,
    ),
)
