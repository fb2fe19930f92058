"""The known platforms, by vLLM's device type."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType

from dbo_runtime.vllm_plugin.api.identity import get_device_type
from dbo_runtime.vllm_plugin.platforms.platform import Platform

_ROOM = "dbo_runtime.vllm_plugin.platforms"
PLATFORMS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "cpu": (f"{_ROOM}.cpu", "CpuPlatform"),
        "cuda": (f"{_ROOM}.cuda", "CudaPlatform"),
        "npu": (f"{_ROOM}.npu", "NpuPlatform"),
    }
)
"""Module and class by device type."""


def get_platform(name: str | None = None) -> Platform:
    """Return the platform of this name, by default the one vLLM serves on. An unknown platform declines everything."""
    name = get_device_type() if name is None else name
    if name not in PLATFORMS:
        return Platform(name)
    module, kind = PLATFORMS[name]
    platform: Platform = getattr(import_module(module), kind)(name)
    return platform
