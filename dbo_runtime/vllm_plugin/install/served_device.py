"""Which lanes a served model's ops may be on."""

from __future__ import annotations

from dbo_runtime.config import RuntimeConfig
from dbo_runtime.vllm_plugin.platforms.platform import Platform


def has_side_lane(platform: Platform, config: RuntimeConfig) -> bool:
    """Return whether a model's ops may be on a second compute lane."""
    return config.side == "on" or (config.side == "auto" and platform.has_side_lane)
