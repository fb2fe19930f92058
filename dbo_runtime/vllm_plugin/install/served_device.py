"""The device that vLLM serves on, and which lanes a model's ops may be on there."""

from __future__ import annotations

from typing import Any

from dbo_runtime.config import RuntimeConfig
from dbo_runtime.devices import Device, open_device
from dbo_runtime.program import SIDE
from dbo_runtime.vllm_plugin.api import compat


def has_side_lane(platform: str, config: RuntimeConfig) -> bool:
    """Return whether a model's ops may be on a second compute lane.

    On the CPU such a lane would take the cores of the first, so it is there only for those who ask, to try programs.
    """
    return config.side == "on" or (config.side == "auto" and platform != "cpu")


def open_served_device(collectives: Any, config: RuntimeConfig, log: Any) -> Device:
    """Open the device that vLLM serves on, whatever else the machine has; *collectives* know its communicators."""
    from dbo_runtime.vllm_plugin.platforms.thread_state import capture_thread_state

    platform = compat.get_device_type()
    options: dict[str, dict[str, Any]] = {
        # vLLM's kernels for CPU work in one scratchpad a process: two at the same time end in a segmentation fault.
        "cpu": {"capture_state": capture_thread_state, "inline": {SIDE}},
        "cuda": {},
        "npu": {"groups": collectives.process_groups},
    }
    if config.side_cores and platform == "npu":
        from dbo_runtime.devices.npu import CoreLimit

        options["npu"]["core_limits"] = {SIDE: CoreLimit(*config.side_cores)}
    elif config.side_cores:
        log.warning("DBO_SIDE_CORES has no effect: only an NPU can keep a lane to some of its cores", device=platform)
    return open_device(platform, **options[platform])
