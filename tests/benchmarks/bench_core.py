"""What planning and issuing cost, on ops that do nothing.

    python -m pytest tests/benchmarks -o python_files='bench_*.py' -q -s

Figures are the best of several runs, so that what else the machine does counts little. Targets are for a model of 61
layers of 9 ops (DeepSeek-V3) in 2 micro-batches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from dbo_runtime.devices import Device, DirectCalls, Lane, Task, Values, open_device
from dbo_runtime.engine.event_table import EventTable
from dbo_runtime.engine.executor import Executor
from dbo_runtime.ir.lowering import lower
from dbo_runtime.ir.policies import alternate
from dbo_runtime.ir.program import Program, ProgramBuilder
from dbo_runtime.ir.schedule import Schedule
from dbo_runtime.ir.validate import validate

LAYERS = 61
MICRO_BATCHES = 2
MOST_PLANNING = 0.1  # seconds
MOST_ISSUING = 2e-6  # seconds an op


def do_nothing(*_: Any) -> None:
    """An op's function."""


def do_nothing_twice(*_: Any) -> tuple[None, None]:
    """The function of an op that writes two values."""
    return None, None


def record_decoder(layers: int) -> Program:
    """Return MoE layers of 9 ops each, 3 of which communicate."""
    p = ProgramBuilder()
    x = residual = p.input("x")
    for index in range(layers):
        with p.layer(index):
            x, residual = p.compute("attn_norm", do_nothing_twice, x, residual, outputs=2)
            x = p.compute("attention", do_nothing, x, ordered=True)
            x = p.comm("attn_reduce", do_nothing, x, overwrites=(x,))
            x, residual = p.compute("mlp_norm", do_nothing_twice, x, residual, outputs=2)
            sent = p.comm("dispatch", do_nothing, x, exclusive="a2a")
            shared = p.compute("shared_experts", do_nothing, x)
            routed = p.compute("experts", do_nothing, sent)
            routed = p.comm("combine", do_nothing, routed, exclusive="a2a")
            x = p.compute("merge", do_nothing, routed, shared)
    return p.build(x)


class FreeLane:
    """A lane on which launching, recording and waiting cost nothing: what is left is what the executor costs."""

    def __init__(self, name: str) -> None:
        self.name = name

    def launch(self, task: Task, values: Values) -> None:
        task(values)

    def record(self, event: object) -> None: ...

    def wait(self, event: object) -> None: ...

    def get_direct_calls(self) -> DirectCalls:
        return DirectCalls(None, self.record, self.wait)


class FreeDevice:
    """A device of free lanes."""

    name = "free"

    def open_lanes(self, names: Sequence[str]) -> list[Lane]:
        return [FreeLane(name) for name in names]

    def make_event(self) -> object:
        return object()

    def begin(self) -> None: ...

    def release_to_caller(self, values: object) -> None: ...

    def finish(self) -> None: ...

    def abort(self) -> None: ...

    def close(self) -> None: ...


def best(runs: int, measured: Callable[[], object]) -> float:
    """Return the seconds of the fastest run."""
    seconds = []
    for _ in range(runs):
        start = time.perf_counter()
        measured()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def plan(programs: Sequence[Program]) -> Schedule:
    schedule = lower(programs, alternate(programs))
    validate(schedule)
    return schedule


def measure_planning(layers: int, runs: int = 5) -> float:
    programs = [record_decoder(layers)] * MICRO_BATCHES
    return best(runs, lambda: plan(programs))


def measure_issuing(layers: int, device: Device, runs: int = 20) -> float:
    """Return seconds an op."""
    schedule = plan([record_decoder(layers)] * MICRO_BATCHES)
    executor = Executor(schedule, device, EventTable(device))
    seconds = best(runs, lambda: executor.run([(None,)] * MICRO_BATCHES))
    device.close()
    return seconds / len(schedule.instructions)


def test_planning_a_large_model_takes_a_moment() -> None:
    programs = [record_decoder(LAYERS)] * MICRO_BATCHES
    order = alternate(programs)
    schedule = lower(programs, order)
    lowering, validation = best(5, lambda: lower(programs, order)), best(5, lambda: validate(schedule))
    planning = measure_planning(LAYERS)
    print(
        f"\n{LAYERS} layers, {MICRO_BATCHES} micro-batches, {len(schedule.instructions)} ops: "
        f"order, lowering and validation {planning * 1e3:.1f} ms "
        f"(lowering {lowering * 1e3:.1f}, validation {validation * 1e3:.1f}; target {MOST_PLANNING * 1e3:.0f})"
    )
    assert planning <= MOST_PLANNING


def test_issuing_an_op_costs_little() -> None:
    free = measure_issuing(LAYERS, FreeDevice())
    print(f"\nissuing an op that does nothing: {free * 1e6:.2f} us (target {MOST_ISSUING * 1e6:.0f})")
    for name in ("virtual", "cpu"):
        cost = measure_issuing(LAYERS, open_device(name))
        print(f"  with lanes of the device {name!r}: {cost * 1e6:.2f} us")
    assert free <= MOST_ISSUING
