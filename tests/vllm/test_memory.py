"""What vLLM's memory profile sees of split steps. The CPU has nothing to reserve: there only the split run is shown."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dbo_runtime.devices.torch_streams import StreamDevice
from dbo_runtime.vllm_plugin import compat
from dbo_runtime.vllm_plugin.memory import copy_for_profile, reserve_split_step
from tests.vllm.engine import Engine

GROUP = SimpleNamespace(world_size=1, rank_in_group=0)


@pytest.mark.vllm
def test_vllms_profile_runs_split_without_attention_metadata_and_is_not_counted(one_rank: Engine) -> None:
    model = one_rank.runner.get_model()
    served = model.forward
    own = copy_for_profile(served, GROUP)
    before = served.runtime.statistics.as_dict()
    model.forward = own
    try:
        compat.run_profile(one_rank.runner)
    finally:
        model.forward = served
    assert own.runtime.statistics.as_dict() == {"split": 1, "micro_batches": 2, "declined": {}}
    assert served.runtime.statistics.as_dict() == before
    assert not served.planner.profiling


@pytest.mark.vllm
def test_on_the_cpu_nothing_is_reserved(one_rank: Engine) -> None:
    assert reserve_split_step(one_rank.runner, GROUP) is None


class Backend:
    """Answers as `torch.npu` and `torch.cuda` do when they are asked about memory."""

    def __getattr__(self, name: str) -> Any:
        return lambda: {"memory_reserved": 100, "max_memory_reserved": 164}.get(name)


@pytest.mark.vllm
def test_where_lanes_have_memory_of_their_own_a_split_profile_is_run_and_its_memory_taken(
    one_rank: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device's own part runs on the stand-in for CANN, in tests/devices/test_streams.py."""
    served = one_rank.runner.get_model().forward
    device = StreamDevice("cpu", Backend())
    ran: list[Any] = []
    monkeypatch.setattr(served.runtime, "device", device)
    monkeypatch.setattr(compat, "run_profile", lambda runner: ran.append(runner.get_model().forward))
    assert reserve_split_step(one_rank.runner, GROUP) == 64
    assert ran[0].planner.profiling
    assert one_rank.runner.get_model().forward is served
