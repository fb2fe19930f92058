"""On which platforms of vLLM steps are split."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from dbo_runtime.config import RuntimeConfig
from dbo_runtime.vllm_plugin.api import compat
from dbo_runtime.vllm_plugin.install import model_setup as attachment
from dbo_runtime.vllm_plugin.install import served_device
from dbo_runtime.vllm_plugin.platforms import ascend


@pytest.mark.parametrize(
    ("platform", "check", "reason"),
    [
        ("cpu", False, None),
        ("cpu", True, None),
        ("npu", False, "vllm-ascend is not installed; with DBO_CHECK=1"),
        ("npu", True, None),
        ("cuda", False, "not proven on 'cuda' yet; with DBO_CHECK=1"),
        ("cuda", True, None),
        ("xpu", True, "there is no device for 'xpu'"),
    ],
)
def test_steps_are_split_where_that_is_proven_or_checked(platform: str, check: bool, reason: str | None) -> None:
    found = attachment.check_proven(platform, RuntimeConfig(enabled=True, check=check))
    assert found is None if reason is None else str(found).startswith(reason)


@pytest.mark.parametrize(("release", "known"), [("0.30.0rc2", True), ("0.30.0", False), ("0.31.0", False)])
def test_beside_vllm_ascend_its_version_decides(release: str, known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ascend, "version", lambda name: release)
    found = attachment.check_proven("npu", RuntimeConfig(enabled=True))
    wanted = f"vllm-ascend {release} is not one that this dbo_runtime knows (0.30.0rc2); with DBO_CHECK=1 steps are"
    assert found is None if known else str(found).startswith(wanted)


def test_beside_vllm_ascend_other_models_are_compared_or_whole() -> None:
    find = attachment.check_proven_model
    assert find("npu", "DeepseekV3ForCausalLM", RuntimeConfig(enabled=True)) is None
    assert find("cpu", "LlamaForCausalLM", RuntimeConfig(enabled=True)) is None
    assert find("npu", "LlamaForCausalLM", RuntimeConfig(enabled=True, check=True)) is None
    found = find("npu", "LlamaForCausalLM", RuntimeConfig(enabled=True))
    assert str(found).startswith("LlamaForCausalLM is not proven beside vllm-ascend yet; with DBO_CHECK=1")


def test_where_ranks_have_links_of_their_own_there_is_communication_to_hide_on_one_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = SimpleNamespace(world_size=2)
    monkeypatch.setattr(compat, "get_device_type", lambda: "npu")
    assert compat.get_transport(compat.Groups(group, group, group), hosts=1) == "device"


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
    assert served_device.has_side_lane(platform, RuntimeConfig(enabled=True, side=side)) is found
