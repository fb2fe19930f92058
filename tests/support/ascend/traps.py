"""State that vllm-ascend keeps in one place, and what happens if micro-batches share it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

from tests.support.ascend.jobs import make_prompts

PROMPTS = [make_prompts(40, 30, 20, 10, 5, 50)]
PLATFORM = "dbo_runtime.vllm_plugin.platforms.npu.NpuPlatform"


def keep_rotary_tables() -> AbstractContextManager[Any]:
    """Let builds overwrite the one buffer of tables."""
    return patch(f"{PLATFORM}.building_metadata", lambda platform: nullcontext())
