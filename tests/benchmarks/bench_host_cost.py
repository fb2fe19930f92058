"""What it costs the host to take turns between two micro-batches: this executor compared with other mechanisms.

    python -m pytest tests/benchmarks/bench_host_cost.py -q -s

An **overlap point** is a place where the host leaves one micro-batch and goes on with the other, with what belongs to
it: the event that is recorded for the lane that goes on, the turn, and the wait for that event. The cost of a point is
the time of a step by the number of its points, in a step that has little else: one op on either lane between points.
The cost of a step is that of a decoder of 61 layers of 9 ops (DeepSeek-V3), 3 of which communicate, in 2 micro-batches.
Both have 367 points. Ops do nothing and streams and events cost nothing, so what is left is the host's work.

Each round runs every mode once, in random order. Figures are medians over rounds, and ratios are medians of the ratios
within a round, so that what else the machine does counts little.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import Any

import pytest

from dbo_runtime.devices import open_device
from dbo_runtime.devices.serial import SerialDevice
from dbo_runtime.engine.event_table import EventTable
from dbo_runtime.engine.executor import Executor
from dbo_runtime.engine.generated_executor import GeneratedExecutor
from dbo_runtime.ir.lowering import lower
from dbo_runtime.ir.nano_batches import SIZES, Rows, cut_program
from dbo_runtime.ir.policies import alternate
from dbo_runtime.ir.program import Program, ProgramBuilder
from tests.benchmarks.bench_core import LAYERS, MICRO_BATCHES, FreeDevice, best, do_nothing, record_decoder
from tests.benchmarks.handovers import (
    FreeStreams,
    Way,
    find_leaves,
    make_baton,
    make_coroutines,
    make_generators,
    make_operations,
    make_tasks,
    make_ubatches,
)
from tests.benchmarks.rounds import time_in_turns
from tests.support.page import Publish, find_command, make_table

ROUNDS = 60
MAX_POINT_SECONDS = 0.3e-6
MAX_STREAM_POINT_SECONDS = 0.6e-6
MIN_RATIO = 5.0  # vLLM's hand-over by our point
FREE = "ours, the generated function, lanes that cost nothing"
STREAMS = "ours, the generated function, streams of `devices/torch_streams.py` that cost nothing"
NANO = "ours, the same in 2 nano-batches of one step, lanes that cost nothing"
VLLM = "vLLM's `ubatching`: a thread each, woken by `threading.Event`"

Others = Callable[[Program], dict[str, Way]]
Ours = Callable[[Program], dict[str, Callable[[], object]]]


def record_points(points: int) -> Program:
    """Return a program of so many pairs of an op that computes and one that communicates, and a last one to compute."""
    p = ProgramBuilder()
    x = p.input("x")
    for index in range(points):
        with p.layer(index):
            x = p.comm("send", do_nothing, p.compute("work", do_nothing, x))
    return p.build(p.compute("end", do_nothing, x))


DECODER = record_decoder(LAYERS)
BARE = record_points(sum(find_leaves(DECODER)))
POINTS = 2 * sum(find_leaves(DECODER)) + 1  # both micro-batches come in pieces, one more than ops that communicate


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> Iterator[Others]:
    """How others take turns."""
    ubatching: Any = pytest.importorskip("vllm.v1.worker.ubatching", reason="needs vLLM, to compare with")
    greenlet = pytest.importorskip("greenlet", reason="needs greenlet, to compare with")
    streams, loop = FreeStreams(), asyncio.new_event_loop()
    monkeypatch.setattr(ubatching, "torch", streams.torch)
    monkeypatch.setattr(ubatching, "current_stream", streams.find_stream)

    def make(program: Program) -> dict[str, Way]:
        leaves = find_leaves(program)
        return {
            VLLM: make_ubatches(leaves, ubatching, streams),
            "a thread each, woken by a semaphore": make_baton(leaves),
            "SGLang's `operations.py`, written anew: stages between yields": make_operations(leaves),
            "asyncio, a task each": make_tasks(leaves, loop),
            "a generator each": make_generators(leaves),
            "a greenlet each, as `DBO_GENERIC=1` has": make_coroutines(leaves, greenlet),
        }

    yield make
    loop.close()


@pytest.fixture
def ours() -> Iterator[Ours]:
    """How we take turns."""
    cpu = open_device("cpu")
    kinds: dict[str, tuple[type[Executor], Any]] = {
        FREE: (GeneratedExecutor, FreeDevice()),
        STREAMS: (GeneratedExecutor, FreeStreams().make_device()),
        "ours, the plain loop, lanes that cost nothing": (Executor, FreeDevice()),
        "ours, the plain loop, the same streams": (Executor, FreeStreams().make_device()),
        "ours, the generated function, device `cpu` with one lane for all": (GeneratedExecutor, SerialDevice(cpu)),
        "ours, the same, device `cpu`: ops that communicate run on a worker": (GeneratedExecutor, cpu),
    }

    def make(program: Program) -> dict[str, Callable[[], object]]:
        schedule = lower([program] * MICRO_BATCHES, alternate([program] * MICRO_BATCHES))
        executors = {name: kind(schedule, device, EventTable(device)) for name, (kind, device) in kinds.items()}
        ways: dict[str, Callable[[], object]] = {
            name: lambda executor=executor: executor.run([(None,)] * MICRO_BATCHES)
            for name, executor in executors.items()
        }
        return {**ways, NANO: make_nano(program)}

    yield make
    cpu.close()


def make_nano(program: Program) -> Callable[[], object]:
    """Return what runs a step in nano-batches: attention is joint; joining and cutting values costs nothing here."""
    token_wise = replace(program, ops=tuple(replace(op, token_wise=not op.ordered) for op in program.ops))
    rows = Rows(join=lambda parts: parts[0], cut=lambda value, sizes: [value] * len(sizes))
    nano = cut_program(token_wise, MICRO_BATCHES, rows).program
    executor = GeneratedExecutor(lower([nano], alternate([nano])), FreeDevice(), EventTable(FreeDevice()))
    sizes, *parts = nano.inputs
    given = ((1,) * MICRO_BATCHES, *(None for _ in parts))
    assert sizes.name == SIZES
    return lambda: executor.run([given])


def count_turns(micro_batches: list[int]) -> int:
    return sum(one != other for one, other in pairwise(micro_batches))


@pytest.mark.parametrize("program", [BARE, DECODER], ids=["points", "decoder"])
def test_every_way_issues_as_many_ops_and_takes_as_many_turns(program: Program, others: Others) -> None:
    schedule = lower([program] * MICRO_BATCHES, alternate([program] * MICRO_BATCHES))
    issued = [step.issue.micro_batch for step in schedule.instructions]
    assert count_turns(issued) == POINTS
    for name, mode in others(program).items():
        seen: list[int] = []
        mode(seen.append)
        assert (len(seen), count_turns(seen)) == (len(issued), POINTS), name


def measure(program: Program, ours: Ours, others: Others) -> dict[str, list[float]]:
    """Return the seconds of a step of each mode, in each round; a first round warms up."""
    modes = ours(program) | {name: lambda mode=mode: mode(do_nothing) for name, mode in others(program).items()}
    return time_in_turns(modes, ROUNDS)


def measure_making(kind: type[Executor]) -> float:
    """Return the seconds in which an executor of the decoder is made: the best of a few."""
    schedule = lower([DECODER] * MICRO_BATCHES, alternate([DECODER] * MICRO_BATCHES))
    device: Any = FreeStreams().make_device()
    return best(5, lambda: kind(schedule, device, EventTable(device)))


def find_ratio(ones: list[float], others: list[float]) -> float:
    return median(one / other for one, other in zip(ones, others, strict=True))


def test_an_overlap_point_costs_the_host_little(publish: Publish, ours: Ours, others: Others) -> None:
    bare, decoder = (measure(program, ours, others) for program in (BARE, DECODER))
    point, ratio = median(bare[FREE]) / POINTS, find_ratio(bare[VLLM], bare[FREE])
    on_streams, in_step = median(bare[STREAMS]) / POINTS, find_ratio(decoder[VLLM], decoder[FREE])
    in_nano = median(bare[NANO]) / POINTS
    plain, generated = (measure_making(kind) for kind in (Executor, GeneratedExecutor))
    header = ["mechanism", "us a point", "by the first row", "ms a step", "by the first row"]
    table = make_table(header, [describe(name, bare, decoder) for name in bare])
    targets = [
        f"- Target: at most {MAX_POINT_SECONDS * 1e6:.1f} us a point, {MAX_STREAM_POINT_SECONDS * 1e6:.1f} on streams. "
        f"{judge(max(point, in_nano) <= MAX_POINT_SECONDS and on_streams <= MAX_STREAM_POINT_SECONDS)}: "
        f"{point * 1e6:.2f}, {in_nano * 1e6:.2f} between nano-batches, and {on_streams * 1e6:.2f} us.",
        f"- Target: a point at least {MIN_RATIO:.0f} times below vLLM's hand-over. {judge(ratio >= MIN_RATIO)}: "
        f"{ratio:.1f} times.",
        f"- A step of the decoder, ops included, takes vLLM's hand-over {in_step:.1f} times as long as our function.",
        f"- Making the decoder's executor takes {generated * 1e3:.0f} ms ({plain * 1e3:.0f} without the function): "
        "once for each schedule, where a step is first planned with it.",
    ]
    publish("host-cost", find_command(__file__), [*table, "", *targets])
    assert max(point, in_nano) <= MAX_POINT_SECONDS
    assert on_streams <= MAX_STREAM_POINT_SECONDS
    assert ratio >= MIN_RATIO


def describe(name: str, bare: dict[str, list[float]], decoder: dict[str, list[float]]) -> list[str]:
    """Return a row of the table."""
    return [
        name,
        f"{median(bare[name]) / POINTS * 1e6:.2f}",
        f"{find_ratio(bare[name], bare[FREE]):.2f}x",
        f"{median(decoder[name]) * 1e3:.2f}",
        f"{find_ratio(decoder[name], decoder[FREE]):.2f}x",
    ]


def judge(is_reached: bool) -> str:
    return "Reached" if is_reached else "**Missed**"
