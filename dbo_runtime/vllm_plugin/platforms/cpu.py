"""The platform of vLLM's CPU build."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

from dbo_runtime.devices import Device, open_device
from dbo_runtime.ir.op import SIDE
from dbo_runtime.vllm_plugin.platforms.platform import Platform

if TYPE_CHECKING:
    import torch.distributed as dist
    from structlog.typing import FilteringBoundLogger

    from dbo_runtime.config import RuntimeConfig
    from dbo_runtime.vllm_plugin.api.groups import Groups
    from dbo_runtime.vllm_plugin.platforms.encoder_attention import EncoderAttention

_SHARED_MEMORY = "_CPUSHMDistributed"  # vLLM's class for reducing over shared memory


class CpuPlatform(Platform):
    """CPUs. A second compute lane would take cores from the first, so there is one only with DBO_SIDE=on."""

    has_device = True
    is_proven = True
    has_side_lane = False
    exchanges_sizes_separately = False
    host_computes = True
    compiles_ops = True
    needs_cpu_patches = True
    cuts_decodes = True
    splits_lora = True

    def open_device(
        self, process_groups: Sequence[dist.ProcessGroup], config: RuntimeConfig, log: FilteringBoundLogger
    ) -> Device:
        """Open a device whose side lane is the calling thread.

        vLLM's CPU kernels share one scratchpad per process: two kernels at a time end in a segmentation fault.
        """
        self._warn_of_side_cores(config, log)
        return open_device(self.name, capture_state=capture_thread_state, inline={SIDE})

    def get_transport(self, groups: Groups, hosts: int) -> str:
        """Return the ranks' transport; see `Platform.get_transport`.

        If all ranks are on one host, communication takes the cores that compute, so it leaves nothing to hide: over
        Gloo, or over shared memory, which vLLM uses on processors with AVX-512.
        """
        if groups.all_ranks.world_size == 1:
            return "none"
        if hosts > 1:
            return "network"
        communicator = None if groups.data_parallel else groups.tensor_parallel.device_communicator
        module = getattr(communicator, "dist_module", None)
        return "shared memory" if type(module).__name__ == _SHARED_MEMORY else "one host"

    def predict_transport(self, ranks: int, dispatches: bool, hosts: int | None) -> str | None:
        """Return the transport that is to be expected; see `Platform.predict_transport`."""
        if ranks == 1:
            return "none"
        if hosts is None:
            return None
        if hosts > 1:
            return "network"
        return "shared memory" if not dispatches and _has_shared_memory() else "one host"

    def get_chip_name(self) -> str:
        """Return the name of this host's processor."""
        with open("/proc/cpuinfo", encoding="utf-8") as info:
            names = [line.partition(":")[2].strip() for line in info if line.startswith(("model name", "Processor"))]
        return names[0] if names else platform.machine()

    def get_encoder_attention(self) -> type[EncoderAttention]:
        """Return the encoder attention that takes lengths from the host."""
        from dbo_runtime.vllm_plugin.platforms.encoder_attention import CpuAttention

        return CpuAttention


def _has_shared_memory() -> bool:
    """Return whether vLLM's kernels for this processor reduce through shared memory; those for AVX2 do not."""
    import torch
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    return hasattr(torch.ops._C, "init_shm_manager")


def capture_thread_state() -> Callable[[], AbstractContextManager[None]]:
    """Return a factory of context managers that apply the calling thread's inference and grad mode in other threads."""
    import torch

    inference, grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()

    @contextmanager
    def enter() -> Iterator[None]:
        with torch.inference_mode(inference), torch.set_grad_enabled(grad):
            yield

    return enter
