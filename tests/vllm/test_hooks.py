"""On which platforms of vLLM steps are split."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from dbo_runtime.config import RuntimeConfig
from dbo_runtime.vllm_plugin import attachment, compat


@pytest.mark.parametrize(
    ("platform", "check", "reason"),
    [
        ("cpu", False, None),
        ("cpu", True, None),
        ("npu", False, "not proven on 'npu' yet; with DBO_CHECK=1"),
        ("npu", True, None),
        ("cuda", False, "not proven on 'cuda' yet; with DBO_CHECK=1"),
        ("cuda", True, None),
        ("xpu", True, "there is no device for 'xpu'"),
    ],
)
def test_steps_are_split_where_that_is_proven_or_checked(platform: str, check: bool, reason: str | None) -> None:
    found = attachment.find_unproven(platform, RuntimeConfig(enabled=True, check=check))
    assert found is None if reason is None else str(found).startswith(reason)


def test_where_ranks_have_links_of_their_own_there_is_communication_to_hide_on_one_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = SimpleNamespace(world_size=2)
    monkeypatch.setattr(compat, "find_platform", lambda: "npu")
    assert compat.find_transport(compat.Groups(group, group, group), hosts=1) == "device"
