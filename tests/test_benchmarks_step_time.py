"""The benchmark of step times: what it derives from times, what it records, what it sends, what it refuses."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dbo_runtime.decline import Decline
from examples.network_hosts import NetworkError
from tests.benchmarks import bench_step_time, queued_requests, timed_steps
from tests.benchmarks.measured_hosts import BenchError
from tests.benchmarks.step_time_report import AGAIN, AUTO, MODES, OFF, UNSPLIT, find_targets, write_report
from tests.benchmarks.step_timer import StepClock
from tests.benchmarks.targets import find_missed
from tests.benchmarks.timed_steps import Step, Turn, compare_quantiles, find_longer


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timed_steps, "RESAMPLES", 100)


def make_turn(mode: str, number: int, *seconds: float, batch: int = 7) -> Turn:
    steps = [Step([batch, 1], taken, taken / 2, 1e-4, 5e-5, mode in (UNSPLIT, AUTO), mode == AUTO) for taken in seconds]
    return Turn(mode, number, steps)


def test_a_ratio_of_quantiles_is_over_all_rounds_and_rounds_are_drawn_as_a_whole() -> None:
    own, other = [np.full(100, 1.0), np.full(100, 3.0)], [np.full(100, 1.0), np.full(100, 1.0)]
    ratio = compare_quantiles(own, other, 0.5)  # of two rounds are drawn: one twice, the other twice, or both
    assert ratio == pytest.approx((2.0, 1.0, 3.0))
    assert str(ratio) == "2.000 (1.000–3.000)"


def test_what_rounds_have_in_common_is_not_taken_for_noise() -> None:
    chance = np.random.default_rng(0)
    other = [chance.lognormal(round_number, 0.3, 80) for round_number in range(10)]
    own = [1.1 * times for times in other]
    assert compare_quantiles(own, other, 0.99) == pytest.approx((1.1, 1.1, 1.1))


def test_intervals_have_the_true_ratio_in_them_about_as_often_as_they_say() -> None:
    chance, trials = np.random.default_rng(0), 40
    covered = excluded = 0
    for _ in range(trials):
        own, other = ([chance.lognormal(0.0, 0.2, 60) for _ in range(12)] for _ in range(2))
        same, longer = (compare_quantiles([factor * times for times in own], other, 0.9) for factor in (1.0, 1.2))
        covered += same.low <= 1.0 <= same.high
        excluded += longer.low > 1.0
    assert covered >= 0.8 * trials
    assert excluded >= 0.8 * trials


def test_steps_are_compared_where_their_batches_are_the_same() -> None:
    off, auto = make_turn(OFF, 1, 1.0, 2.0, 9.0), make_turn(AUTO, 1, 1.3, 2.1)
    assert find_longer([off, auto], AUTO, OFF, lambda step: step.seconds) == pytest.approx(0.2)
    other = make_turn(OFF, 1, 1.0, 2.0, batch=8)
    assert find_longer([other, auto], AUTO, OFF, lambda step: step.seconds) is None


def make_turns(factor: float) -> list[Turn]:
    """Return rounds in which planned steps take *factor* times as long."""
    factors = {OFF: 1.0, AGAIN: 1.0, UNSPLIT: factor, AUTO: factor}
    return [make_turn(mode, number, *(0.1 * factors[mode],) * 5) for number in range(1, 13) for mode in MODES]


def test_the_report_judges_p99_with_planning_by_that_without() -> None:
    text = "\n".join(write_report({"none": make_turns(1.01), "1gbit": make_turns(1.03)}, rounds=12))
    assert "| none: elapsed, planned, not split / off | ≤ 1.02 | 1.010 | reached |" in text
    assert "| 1gbit: CPU, auto / off | ≤ 1.02 | 1.030 | missed by 1.0% |" in text
    assert "| auto | 60 | 60 | 60 | 100 / 100 | 50 / 50 |" in text
    assert "| elapsed | off, again | 100.0 | 100.0 | 1.000 (1.000–1.000) | 1.000 (1.000–1.000) | +0.00 |" in text
    assert "| elapsed | auto | 103.0 | 103.0 | 1.030 (1.030–1.030) | 1.030 (1.030–1.030) | +3.00 |" in text
    assert "| CPU | auto | 51.5 | 51.5 | 1.030 (1.030–1.030) | 1.030 (1.030–1.030) | +1.50 |" in text
    assert len(find_missed(find_targets({"1gbit": make_turns(1.03)}))) == 4


def test_few_rounds_are_not_judged() -> None:
    assert "judged by 12 rounds or more" in write_report({"none": make_turns(1.0)}, rounds=11)[-1]


class Runtime:
    """Declines small steps early, and splits large ones."""

    def decline_early(self, tokens: int) -> Decline | None:
        return Decline("no gain predicted") if tokens < 5 else None

    def plan(self, tokens: int) -> Any:
        return SimpleNamespace() if tokens > 9 else Decline("nowhere to cut")


class Decider:
    def __init__(self, runtime: Any) -> None:
        self.runtime = runtime

    def decide(self, tokens: int, unsupported: Decline | None) -> Any:
        return SimpleNamespace(plan=self.runtime.decline_early(tokens) or self.runtime.plan(tokens))


class Worker:
    """Decides, unless there are no tokens."""

    def __init__(self, decider: Any) -> None:
        self.decider = decider

    def execute_model(self, scheduler_output: Any) -> str:
        if scheduler_output.num_scheduled_tokens:
            self.decider.decide(sum(scheduler_output.num_scheduled_tokens.values()), None)
        return "result"


@pytest.mark.parametrize("plans_all", [False, True])
def test_steps_with_tokens_are_timed_until_they_are_taken(plans_all: bool) -> None:
    runtime: Any = Runtime()
    decider: Any = Decider(runtime)
    worker = Worker(decider)
    clock = StepClock(worker, decider, runtime, plans_all)
    batches: list[dict[str, int]] = [{"a": 1}, {"a": 1, "b": 5}, {}, {"b": 99}]
    assert {worker.execute_model(SimpleNamespace(num_scheduled_tokens=batch)) for batch in batches} == {"result"}
    steps = clock.stop()
    assert [(step.batch, step.is_planned, step.is_split) for step in steps] == [
        ([1], plans_all, False),
        ([1, 5], True, False),
        ([99], True, True),
    ]
    assert all(0 < step.planning < step.seconds and step.cpu_planning <= step.cpu_seconds for step in steps)
    worker.execute_model(SimpleNamespace(num_scheduled_tokens={"a": 1}))
    assert len(steps) == 3
    assert (vars(runtime), vars(decider), vars(worker)) == ({}, {"runtime": runtime}, {"decider": decider})


def test_requests_are_the_same_for_a_seed_and_mix_prompts_with_answers() -> None:
    requests = queued_requests.make_requests(200, seed=3)
    assert requests == queued_requests.make_requests(200, seed=3)
    assert requests[0]["prompt"] != queued_requests.make_requests(1, seed=4)[0]["prompt"]
    prompts = [len(request["prompt"]) for request in requests]
    assert (min(prompts) < 30, max(prompts) > 200, max(prompts) <= queued_requests.LONGEST_PROMPT) == (True,) * 3
    assert all(1 <= request["max_tokens"] <= queued_requests.LONGEST_ANSWER for request in requests)


class Schedule(BaseHTTPRequestHandler):
    """A server that answers nothing before it is resumed, and refuses empty prompts."""

    server: Any

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked.append(self.path)
        if self.path == "/resume":
            self.server.resumed.set()
        refused = bool(body) and not json.loads(body)["prompt"]
        if body and not refused:
            assert self.server.resumed.wait(60)
        self.send_response(400 if refused else 200)
        self.end_headers()
        self.wfile.write(b"no prompt" if refused else b"{}")

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def server() -> Iterator[Any]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Schedule) as listening:
        listening.asked, listening.resumed = [], Event()  # type: ignore[attr-defined]
        thread = Thread(target=listening.serve_forever)
        thread.start()
        yield listening
        listening.shutdown()
        thread.join()


def send(server: Any, monkeypatch: pytest.MonkeyPatch, prompts: list[list[int]]) -> None:
    monkeypatch.setattr(sys, "argv", ["send", f"http://127.0.0.1:{server.server_port}"])
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps([{"prompt": prompt} for prompt in prompts])))
    queued_requests.main()


def test_requests_are_queued_before_the_first_is_scheduled(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    send(server, monkeypatch, [[1], [2], [3]])
    assert (server.asked[0], sorted(server.asked[1:])) == ("/pause?mode=keep", ["/resume", *["/v1/completions"] * 3])


def test_a_request_that_is_refused_ends_the_bench(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="400 no prompt"):
        send(server, monkeypatch, [[]])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--rates none fast", "'fast' is no rate of a link"),
        ("--rounds 0", "'0' is not a whole number of at least 1"),
        ("--requests few", "'few' is not a whole number of at least 1"),
    ],
)
def test_a_wrong_command_line_is_refused(words: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_step_time", *words.split()])
    with pytest.raises((BenchError, NetworkError), match=re.escape(says)):
        bench_step_time.parse_arguments()
