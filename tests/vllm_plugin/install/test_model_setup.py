"""On which platforms a model's ops may be on a second compute lane."""

from __future__ import annotations

import pytest

from dbo_runtime.config import RuntimeConfig
from dbo_runtime.vllm_plugin.install.model_setup import has_side_lane
from dbo_runtime.vllm_plugin.platforms.registry import get_platform


@pytest.mark.parametrize(
    ("platform", "side", "found"),
    [
        ("cpu", "on", True),
        ("cpu", "auto", False),
        ("cpu", "off", False),
        ("npu", "on", True),
        ("npu", "auto", True),
        ("npu", "off", False),
        ("cuda", "auto", True),
    ],
)
def test_the_cpu_has_a_second_compute_lane_only_for_those_who_ask(platform: str, side: str, found: bool) -> None:
    assert has_side_lane(get_platform(platform), RuntimeConfig(enabled=True, side=side)) is found
