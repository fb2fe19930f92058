"""Room for split steps beside vLLM's KV cache."""

from __future__ import annotations

from typing import Any

from dbo_runtime.devices.torch_streams import StreamDevice
from dbo_runtime.observe.logs import open_log
from dbo_runtime.runtime import MicroBatchRuntime
from dbo_runtime.vllm_plugin import compat
from dbo_runtime.vllm_plugin.forward import SplitForward


def reserve_split_step(runner: Any, group: Any) -> int | None:
    """Run vLLM's memory profile once more, split, so that it counts what lanes take; return the bytes of it.

    Only where lanes have memory of their own: on the CPU they share it, and vLLM does not profile it.
    """
    model = runner.get_model()
    served = model.forward
    if not isinstance(served, SplitForward) or not isinstance(served.runtime.device, StreamDevice):
        return None
    log = open_log(quiet=group.rank_in_group > 0)
    model.forward = copy_for_profile(served, group)
    try:
        taken = served.runtime.device.reserve(lambda: compat.run_profile(runner))
    finally:
        model.forward = served
    log.info("vLLM's memory profile has seen a split step", taken=f"{taken / 2**20:.0f} MiB")
    return taken


def copy_for_profile(served: SplitForward, group: Any) -> SplitForward:
    """Return a forward of the same model that splits every step, with plans and counts of its own."""
    runtime = served.runtime
    own = MicroBatchRuntime(runtime.program, runtime.device, runtime.config, open_log(quiet=True), group.world_size)
    planner = served.planner.copy_for(own, group)
    planner.profiling = True
    return served.copy_for(own, planner)
