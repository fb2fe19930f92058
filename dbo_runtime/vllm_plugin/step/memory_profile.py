"""Room for split steps beside vLLM's KV cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from dbo_runtime.devices.torch_streams import StreamDevice
from dbo_runtime.observe.logs import open_log
from dbo_runtime.vllm_plugin.step.forward import SplitForward


def profile_split(runner: Any, group: Any, profile_run: Callable[[], Any]) -> int | None:
    """Run vLLM's memory profile whole and then split, and let vLLM see what both take together; return those bytes.

    Together, because memory of the other lanes stays with them while a whole step runs. Only where lanes have memory of
    their own, and where vLLM sizes its KV cache by the profile: elsewhere the profile runs as it was.
    """
    served = runner.get_model().forward
    device = served.runtime.device if isinstance(served, SplitForward) else None
    if not isinstance(device, StreamDevice) or runner.vllm_config.cache_config.kv_cache_memory_bytes:
        profile_run()
        return None
    own = copy_for_profile(served, group)
    taken = device.reserve(lambda: run_both(runner, own, profile_run))
    log, statistics = open_log(quiet=group.rank_in_group > 0), own.runtime.statistics
    if statistics.split:
        log.info("vLLM's memory profile has seen a split step", taken=f"{taken / 2**20:.0f} MiB")
    else:
        reasons = ", ".join(statistics.declined) or "the model did not run"
        log.warning("no room is reserved for split steps beside the KV cache", reason=reasons)
    return taken


def run_both(runner: Any, own: SplitForward, profile_run: Callable[[], Any]) -> None:
    """Run the profile as it is, and once more with another forward."""
    model = runner.get_model()
    served = model.forward
    profile_run()
    model.forward = own
    try:
        profile_run()
    finally:
        model.forward = served


def copy_for_profile(served: SplitForward, group: Any) -> SplitForward:
    """Return a forward of the same model that splits every step, and compares none."""
    config = replace(served.runtime.config, check=False)  # without attention metadata results mean nothing
    own = served.copy_for(served.runtime.device, config, group)
    own.planner.profiling = True
    return own
