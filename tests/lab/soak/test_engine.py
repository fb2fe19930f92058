"""What an engine does with a round, without vLLM's own engine; and of processes that fail, whose reason is told."""

from __future__ import annotations

import time
from multiprocessing import Pipe
from types import SimpleNamespace
from typing import Any

import pytest

from dbo_runtime.errors import DeviceError
from dbo_runtime.lab.soak.engine_process import EngineProcess
from dbo_runtime.lab.soak.request import Abilities, Prompt, Request, Round

STEPS = 5  # that each request takes


def ask(arrives: int) -> Request:
    return Request(Prompt(4, 0), {"temperature": 0.0, "max_tokens": 1, "logprobs": 1}, arrives=arrives)


class FakeLLM:
    """Answers each request after some steps, and keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.llm_engine = self
        self._left: dict[str, int] = {}

    def add_request(self, name: str, *_: Any, **__: Any) -> None:
        self.told.append(name)
        self._left[name] = STEPS

    def has_unfinished_requests(self) -> bool:
        return bool(self._left)

    def step(self) -> list[Any]:
        self._left = {name: left - 1 for name, left in self._left.items()}
        done = [name for name, left in self._left.items() if not left]
        self._left = {name: left for name, left in self._left.items() if left}
        return [SimpleNamespace(request_id=name, outputs=[], finished=True) for name in done]

    def collective_rpc(self, name: str, **_: Any) -> list[Any]:
        if name != "dbo_statistics":
            self.told.append(f"{name}, {len(self._left)} running")
        told = {"soak_list_alarms": ["states differ"], "soak_list_failures": ["an op fails"]}
        return [told.get(name)]

    def reset_prefix_cache(self) -> None:
        self.told.append("reset")

    def get_metrics(self) -> list[Any]:
        return []


@pytest.mark.vllm
@pytest.mark.parametrize("pause", [2, 20, None])
def test_costs_are_measured_once_while_nothing_runs_and_prefixes_stay(pause: int | None) -> None:
    from dbo_runtime.lab.soak.engine import Engine

    engine, llm = Engine.__new__(Engine), FakeLLM()
    vars(engine).update(_llm=llm, _loras=[], abilities=Abilities(320, frozenset(), 64), _calibrated=0)
    engine.watch(calibrates=True, first_steps=True)
    traffic = Round(0, "0/0", {number: ask(turn) for number, turn in enumerate((0, 1, 2, 4))}, pause)
    answers, counts = engine.run(traffic, traffic.turns)
    measured = "dbo_calibrate, 0 running"
    expected = {
        2: ["0", "1", measured, "2", "3"],
        20: ["0", "1", "2", "3", measured],
        None: ["0", "1", "2", "3"],
    }
    asked = ["soak_list_alarms, 0 running", "soak_list_failures, 0 running"]
    assert llm.told == ["reset", "soak_compare_first_steps, 0 running", *expected[pause], *asked]
    assert counts.calibrated == (pause is not None)
    assert counts.alarms == {"states differ": 1}
    assert counts.failures == {"an op fails": 1}
    assert [*answers] == [0, 1, 2, 3]


@pytest.mark.vllm
def test_requests_that_are_never_scheduled_again_end_the_round(monkeypatch: pytest.MonkeyPatch) -> None:
    from dbo_runtime.lab.soak import engine as module

    monkeypatch.setattr(module, "IDLE_STEPS", STEPS - 1)  # each request needs one more
    engine = module.Engine.__new__(module.Engine)
    vars(engine).update(_llm=FakeLLM(), _loras=[], abilities=Abilities(320, frozenset(), 64), _calibrated=0)
    engine.watch(calibrates=False, first_steps=False)
    engine.run(Round(0, "0/0", {0: ask(0)}), 1)
    monkeypatch.setattr(module, "IDLE_STEPS", STEPS - 2)
    with pytest.raises(DeviceError, match=r"answered none of requests \[0\] in 3 steps"):
        engine.run(Round(0, "0/0", {0: ask(0)}), 1)


@pytest.mark.vllm
def test_a_step_that_schedules_nothing_runs_a_dummy_batch_for_the_other_ranks() -> None:
    from dbo_runtime.lab.soak.engine import _keep_ranks_together

    ran: list[str] = []
    core = SimpleNamespace(execute_dummy_batch=lambda: ran.append("dummy"))
    for outputs, has_executed in (({}, False), ({0: "answer"}, True)):
        core.step_fn = lambda found=(outputs, has_executed): found
        _keep_ranks_together(core)
        assert core.step_fn() == (outputs, has_executed)
        assert ran == ["dummy"]


def test_a_rank_that_fails_is_told_while_another_waits_for_it() -> None:
    engine = EngineProcess.__new__(EngineProcess)
    pipes = [Pipe() for _ in range(2)]
    vars(engine).update(_pipes=[here for here, _ in pipes], _quote=lambda: "")
    pipes[1][1].send((False, "ScheduleError: ranks differ"))
    start = time.monotonic()
    with pytest.raises(DeviceError, match=r"vLLM fails \(rank 1\): ScheduleError: ranks differ"):
        engine._collect(60.0)
    assert time.monotonic() - start < 30
    pipes[1][1].send((True, "one"))
    with pytest.raises(DeviceError, match=r"\(rank 0\) has not answered within 0 s"):
        engine._collect(0.1)
    for number in (1, 0):
        pipes[number][1].send((True, number))
    assert engine._collect(60.0) == [0, 1]
    pipes[0][1].close()
    with pytest.raises(DeviceError, match=r"process \(rank 0\) has died"):
        engine._collect(60.0)
