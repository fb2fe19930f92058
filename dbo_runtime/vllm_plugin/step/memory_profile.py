"""Reserve memory for split steps, next to vLLM's KV cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from dbo_runtime.devices.torch_streams import StreamDevice
from dbo_runtime.observe.logs import open_log
from dbo_runtime.vllm_plugin.step.forward import SplitForward
from dbo_runtime.vllm_plugin.step.rehearsal import copy_for_profile, try_split

if TYPE_CHECKING:
    from vllm.distributed.parallel_state import GroupCoordinator
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner


def profile_split(
    runner: GPUModelRunner, served: SplitForward, group: GroupCoordinator, profile_run: Callable[[], None]
) -> int | None:
    """Run vLLM's memory profile unsplit and then split, and let vLLM see the sum; return the reserved bytes.

    The sum counts, because memory of the other lanes stays allocated while an unsplit step runs. If lanes share their
    memory, or vLLM does not size its KV cache by the profile, only vLLM's own profile runs, and the result is None.
    """
    device = served.runtime.device
    if not isinstance(device, StreamDevice) or runner.vllm_config.cache_config.kv_cache_memory_bytes:
        profile_run()
        return None
    own = copy_for_profile(served, device, group)
    reserved = device.reserve(lambda: run_both(runner, served, own, profile_run, group))
    log, statistics = open_log(quiet=group.rank_in_group > 0), own.runtime.statistics
    if statistics.split:
        log.info("vLLM's memory profile includes a split step", reserved=f"{reserved / 2**20:.0f} MiB")
    else:
        reasons = ", ".join(statistics.declined) or "the model did not run"
        log.warning("no memory is reserved for split steps next to the KV cache", reason=reasons)
    return reserved


def run_both(
    runner: GPUModelRunner,
    served: SplitForward,
    own: SplitForward,
    profile_run: Callable[[], None],
    group: GroupCoordinator,
) -> None:
    """Run the profile as it is, and again with the forward *own*. If that fails, nothing is split."""
    profile_run()
    try_split(runner, served, own, profile_run, group)
