"""Answer the same random traffic with split and with unsplit steps, and compare."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any, NamedTuple

from dbo_runtime.errors import ConfigError, DeviceError
from dbo_runtime.lab.progress import show_progress
from dbo_runtime.lab.soak.answer import Answer
from dbo_runtime.lab.soak.comparison import ALARM, FAILURE, TOLERANCE, Difference, compare_answers
from dbo_runtime.lab.soak.engine_process import EngineProcess
from dbo_runtime.lab.soak.judge import find_own_differences, is_own, starts_from_others
from dbo_runtime.lab.soak.report import Bug, EquivalenceReport, Tally
from dbo_runtime.lab.soak.request import Request, Round
from dbo_runtime.setting_sources import make_switch

REQUESTS = 300
ROUND_REQUESTS = 48  # requests in flight together, per rank
PLAIN, OFF = "vLLM without dbo_runtime", "vLLM with DBO_MODE=off"
NO_SETTINGS: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class Setup:
    """The model to serve, and the traffic to send.

    Attributes:
        model: directory or name of the model.
        settings: settings of this package, by variable.
        requests: number of requests.
        seed: seed of the traffic.
        rounds: numbers of the rounds to run; None for all.
        loras: directories of LoRA adapters.
        tolerance: largest accepted difference of log-probabilities and of pooled numbers.
        calibrates: whether costs are measured between requests.
        first_steps: whether first steps are compared.
        options: options for vLLM's `LLM`.
    """

    model: str
    settings: Mapping[str, str] = field(default_factory=dict)
    requests: int = REQUESTS
    seed: int = 0
    rounds: Collection[int] | None = None
    loras: Sequence[str] = ()
    tolerance: float = TOLERANCE
    calibrates: bool = False
    first_steps: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        """Number of data parallel ranks."""
        return int(self.options.get("data_parallel_size", 1))

    @property
    def reference(self) -> str:
        """The engine to compare with.

        vLLM's own CPU build runs no expert parallelism, no pipelines, no drafts and not all of LoRA.

        This package patches vLLM for these. The patches also apply with `DBO_MODE=off`.
        """
        options = self.options
        needs = self.ranks > 1 or self.loras or options.get("pipeline_parallel_size", 1) > 1
        is_patched = needs or options.get("enable_expert_parallel") or options.get("speculative_config")
        return OFF if is_patched else PLAIN

    def start(self, mode: str) -> EngineProcess:
        """Start an engine with DBO_MODE *mode*; if that is empty, without overlap."""
        variables: dict[str, str | None] = {**make_switch(False)}
        if mode:
            variables = {**self.settings, **make_switch(True), "DBO_MODE": mode}
        options = {name: value for name, value in self.options.items() if name != "data_parallel_size"}
        return EngineProcess(self.model, self.ranks, self.loras, options, variables)

    def start_reference(self) -> EngineProcess:
        """Start the engine that does not split."""
        return self.start("off" if self.reference == OFF else "")

    def draw(self, engine: EngineProcess) -> list[Round]:
        """Return all rounds to run.

        Raises:
            ConfigError: a requested round does not exist.
        """
        from dbo_runtime.lab.soak.traffic import draw_round  # imported late, because it needs hypothesis

        size = ROUND_REQUESTS * self.ranks
        numbers: Sequence[int] = range(-(-self.requests // size))
        if self.rounds is not None:
            wrong = sorted(set(self.rounds) - set(numbers))
            if wrong:
                raise ConfigError(f"there is no round {wrong[0]} in {self.requests} requests: {len(numbers)}, from 0.")
            numbers = sorted(self.rounds)
        return [
            draw_round(engine.abilities, number, min(size, self.requests - number * size), self.seed, self.calibrates)
            for number in numbers
        ]

    def format_command(self) -> str:
        """Return the command that repeats a round. `ROUND` stands for the round's number."""
        words = ["dbo", "soak", self.model, "--requests", str(self.requests), "--seed", str(self.seed)]
        words += [word for path in self.loras for word in ("--lora", path)]
        words += [] if self.tolerance == TOLERANCE else ["--tolerance", str(self.tolerance)]
        words += ["--calibrate-between"] * self.calibrates + ["--first-steps"] * self.first_steps
        for name, value in self.options.items():
            flag = f"--{name.replace('_', '-')}"
            text = json.dumps(value) if isinstance(value, dict | list) else str(value)
            words += [flag if value else f"--no-{flag[2:]}"] if isinstance(value, bool) else [flag, text]
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.settings.items()]
        return " ".join([*variables, shlex.join(words), "--rounds ROUND"])


class Suspect(NamedTuple):
    """A request whose split answer differs from the unsplit one, with the first difference."""

    tally: Tally
    round: int
    number: int
    request: Request
    difference: Difference


def check_equivalence(
    model: str,
    settings: Mapping[str, str] = NO_SETTINGS,
    requests: int = REQUESTS,
    micro_batches: Iterable[int] = (2,),
    seed: int = 0,
    rounds: Collection[int] | None = None,
    loras: Sequence[str] = (),
    tolerance: float = TOLERANCE,
    calibrates: bool = False,
    first_steps: bool = False,
    **engine_options: Any,
) -> EquivalenceReport:
    """Answer random traffic with real engines, once unsplit and once with as many steps split as possible; compare.

    Engines run in separate processes, one after the other, in float32, with a small KV cache and small steps, so that
    requests are preempted and prompts come in chunks. Requests differ in length, shared prefixes, time of arrival,
    aborts, and in other features of vLLM.

    Args:
        model: directory or name of the model.
        settings: settings of this package by variable, such as {"DBO_POLICY": "staggered:1"}.
        requests: number of requests, for each number of micro-batches.
        micro_batches: numbers of micro-batches to split into, all with the same requests.
        seed: seed of the traffic.
        rounds: numbers of the rounds to run, to repeat a failure; by default all.
        loras: directories of LoRA adapters that requests use; also pass `enable_lora=True`.
        tolerance: largest accepted difference of log-probabilities, of equally likely tokens, and of pooled numbers.
        calibrates: whether to measure op costs in the middle of each round, while prefixes are cached and no request
            runs.
        first_steps: whether to compare the first split steps of each kind in each round, as with an untested vLLM
            version.
        engine_options: options for vLLM's `LLM`, such as `tensor_parallel_size`; also `data_parallel_size`.

    Raises:
        ConfigError: hypothesis is not installed, or there is no such round.
        DeviceError: vLLM does not start, or fails without overlap.
    """
    if find_spec("hypothesis") is None:
        raise ConfigError("needs hypothesis, which is not installed: pip install 'dbo-runtime[lab]'")
    start = time.monotonic()
    setup = Setup(model, settings, requests, seed, rounds, loras, tolerance, calibrates, first_steps, engine_options)
    with setup.start_reference() as engine:
        traffic = setup.draw(engine)
        expected = {each.number: engine.run(each)[0] for each in show_progress(traffic, "unsplit", "round")}
    report = EquivalenceReport(model, setup.reference, seed, setup.format_command(), [Tally(n) for n in micro_batches])
    suspects: list[Suspect] = []
    with setup.start("always") as engine:
        engine.watch(calibrates, first_steps)
        for tally in report.tallies:
            suspects += _run_split(setup, engine, tally, traffic, expected)
            if any(bug.difference.kind == FAILURE for bug in tally.bugs):
                break
    if suspects:
        _judge(setup, traffic, expected, suspects)
    report.seconds = time.monotonic() - start
    return report


def _run_split(
    setup: Setup,
    engine: EngineProcess,
    tally: Tally,
    traffic: Sequence[Round],
    expected: Mapping[int, dict[int, Answer]],
) -> list[Suspect]:
    """Answer all rounds split, count them, and return the differences. A failing step is a bug, and ends the run."""
    start = time.monotonic()
    suspects: list[Suspect] = []
    number = traffic[0].number
    try:
        engine.configure({"DBO_MICRO_BATCHES": str(tally.micro_batches)})
        for each in show_progress(traffic, f"in {tally.micro_batches} micro-batches", "round"):
            number = each.number
            answers, counts = engine.run(each)
            tally.note_answers(each, answers)
            tally.counts.add(counts)
            suspects += _compare_round(setup, tally, each, expected[number], answers)
            alarms = [Difference(ALARM, None, None, text) for text in counts.alarms]
            tally.bugs += [Bug(tally.micro_batches, number, None, None, alarm) for alarm in alarms]
            if counts.failures:
                raise DeviceError("; ".join(counts.failures))
    except DeviceError as error:
        tally.bugs.append(Bug(tally.micro_batches, number, None, None, Difference(FAILURE, None, None, str(error))))
    tally.seconds = time.monotonic() - start
    return suspects


def _compare_round(
    setup: Setup, tally: Tally, traffic: Round, expected: Mapping[int, Answer], answers: Mapping[int, Answer]
) -> list[Suspect]:
    """Count equal answers and ties; return the differences."""
    suspects: list[Suspect] = []
    for number, request in traffic.requests.items():
        found = compare_answers(request, expected[number], answers[number], setup.tolerance)
        if found.difference is not None:
            suspects.append(Suspect(tally, traffic.number, number, request, found.difference))
            continue
        tally.largest = max(tally.largest, found.largest)
        if found.tie is None:
            tally.equal += 1
        else:
            tally.ties += 1
    return suspects


def _judge(
    setup: Setup, traffic: Sequence[Round], expected: Mapping[int, dict[int, Answer]], suspects: Sequence[Suspect]
) -> None:
    """Count differences as vLLM's own or as bugs."""
    with setup.start_reference() as engine:
        for each in show_progress(traffic, "differences", "round"):
            here = [suspect for suspect in suspects if suspect.round == each.number]
            if not here:
                continue
            kinds_by_request: dict[int, set[str]] = {}
            for suspect in here:
                kinds_by_request.setdefault(suspect.number, set()).add(suspect.difference.kind)
            kinds = find_own_differences(engine, each, expected[each.number], kinds_by_request, setup.tolerance)
            for tally, _, number, request, difference in here:
                if is_own(difference.kind, number, kinds) or starts_from_others(engine.abilities, request):
                    tally.own += 1
                else:
                    tally.bugs.append(Bug(tally.micro_batches, each.number, number, request, difference))
