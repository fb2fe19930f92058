"""What vLLM's workers refuse over RPC."""

from __future__ import annotations

import pytest

from dbo_runtime.errors import ConfigError
from dbo_runtime.vllm_plugin.extension import WorkerExtension


def test_settings_that_are_read_at_start_are_refused_before_anything_changes() -> None:
    with pytest.raises(ConfigError, match=r"^DBO_DISPATCH, DBO_TRACE: read at start only"):
        WorkerExtension().dbo_configure({"DBO_MODE": "off", "DBO_TRACE": "traces", "DBO_DISPATCH": "all_to_all"})
