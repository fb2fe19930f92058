"""What vLLM's memory profile sees of split steps, on vLLM's CPU build, which has no memory of lanes to reserve.

The device's own part, `StreamDevice.reserve`, runs on a real caching allocator in tests/devices/test_streams.py.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from dbo_runtime.decline import Decline
from dbo_runtime.devices.cpu import CpuDevice
from dbo_runtime.devices.torch_streams import StreamDevice
from dbo_runtime.vllm_plugin.step.forward import SplitForward
from dbo_runtime.vllm_plugin.step.local_plan import LocalPlanner
from dbo_runtime.vllm_plugin.step.rehearsal import copy_for_profile, profile_split, run_both
from dbo_runtime.vllm_plugin.step.warm_up import Phase
from tests.support.vllm.engine import Engine

GROUP = SimpleNamespace(world_size=1, rank_in_group=0)

pytestmark = pytest.mark.vllm


@pytest.fixture
def served(one_rank: Engine) -> SplitForward:
    forward: SplitForward = one_rank.runner.get_model().forward
    return forward


class Reserving(CpuDevice, StreamDevice):  # type: ignore[misc] - their lanes differ, and only those of the CPU are used
    """The CPU, which says of itself that its lanes have memory of their own."""

    def reserve(self, run: Any) -> int:
        run()
        return 3 << 20


@pytest.fixture
def reserving(served: SplitForward, monkeypatch: pytest.MonkeyPatch, one_rank: Engine) -> SplitForward:
    """Return the served forward on such a device, with vLLM sizing its KV cache by the profile."""
    monkeypatch.setattr(served.runtime, "device", Reserving())
    monkeypatch.setattr(one_rank.runner.vllm_config.cache_config, "kv_cache_memory_bytes", None)
    return served


def test_vllms_profile_runs_split_without_attention_metadata_and_is_not_counted(
    one_rank: Engine, served: SplitForward
) -> None:
    own = copy_for_profile(served, served.runtime.device, GROUP)
    before = served.runtime.statistics.as_dict()
    run_both(one_rank.runner, served, own, one_rank.runner.profile_run, GROUP)
    assert own.runtime.statistics.as_dict() == {
        "split": 1,
        "nano": 0,
        "concurrent": 0,
        "micro_batches": 2,
        "declined": {},
    }
    after = served.runtime.statistics.as_dict()
    assert after["split"] == before["split"]
    assert one_rank.runner.get_model().forward is served
    assert served.phase is not Phase.PROFILING


def test_on_the_cpu_the_profile_runs_once_as_it_was(one_rank: Engine, served: SplitForward) -> None:
    runs: list[None] = []
    assert profile_split(one_rank.runner, served, GROUP, lambda: runs.append(None)) is None
    assert len(runs) == 1


def test_where_vllm_is_told_how_large_its_cache_is_nothing_is_reserved(
    one_rank: Engine, reserving: SplitForward, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(one_rank.runner.vllm_config.cache_config, "kv_cache_memory_bytes", 1 << 27)
    assert profile_split(one_rank.runner, reserving, GROUP, lambda: None) is None


def test_a_split_profile_is_reserved_for_and_its_results_are_not_checked(
    one_rank: Engine, reserving: SplitForward, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reserving.runtime, "config", replace(reserving.runtime.config, check=True))
    monkeypatch.setattr(
        "dbo_runtime.vllm_plugin.step.comparison.describe_difference",
        lambda *_: pytest.fail("what means nothing was compared"),
    )
    monkeypatch.setattr(reserving, "phase", Phase.STARTING)
    assert profile_split(one_rank.runner, reserving, GROUP, one_rank.runner.profile_run) == 3 << 20
    assert "vLLM's memory profile includes a split step  reserved=3 MiB" in capfd.readouterr().err


def test_a_profile_that_could_not_be_split_is_told_of(
    one_rank: Engine, reserving: SplitForward, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(LocalPlanner, "plan_dummy", lambda *_: Decline("no reason at all"))
    profile_split(one_rank.runner, reserving, GROUP, one_rank.runner.profile_run)
    said = capfd.readouterr().err
    assert "WARNING" in said
    assert "no memory is reserved for split steps next to the KV cache  reason=no reason at all" in said
