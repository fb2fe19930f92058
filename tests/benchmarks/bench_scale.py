"""How planning and issuing grow with the model: time and memory against layers, ops a layer, and micro-batches.

    python -m pytest tests/benchmarks/bench_scale.py -q -s

Layers are of three ops (norm, work, send), or of as many again, that do nothing. One number grows at a time, the others
stay at those of DeepSeek-V3 in 2 micro-batches. Planning is what the first step of a kind pays: where to cut, and a
search for the issue order, from costs. Time is that of the processor, the least of some runs, so that what else the
machine does counts little. Memory is the peak of what a stage allocates, by tracemalloc, in a run of its own; planning
takes about eight times as long under it, so for the largest sizes its memory is left out.
"""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from typing import NamedTuple

import pytest

from dbo_runtime.batch import Batch
from dbo_runtime.config import RuntimeConfig
from dbo_runtime.engine.event_table import EventTable
from dbo_runtime.engine.executor import Executor
from dbo_runtime.ir.lowering import lower
from dbo_runtime.ir.policies import alternate
from dbo_runtime.ir.program import Program, ProgramBuilder
from dbo_runtime.ir.validate import validate
from dbo_runtime.lab.whatif.scale import set_layers
from dbo_runtime.planner.costs.cost_table import CostTable, Provenance
from dbo_runtime.planner.costs.op_cost import CommCost, ComputeCost, HostCost, OpCost
from dbo_runtime.planner.costs.program_spec import build_program, describe_program
from dbo_runtime.planner.online.planner import Planner
from tests.benchmarks.bench_core import FreeDevice, do_nothing, do_nothing_twice
from tests.support.page import Publish, find_command, make_table

MAX_GROWTH = 3.0  # by how much a unit may cost more at the largest size than at a moderate one
PROMPT = Batch((4096,), 4096)
BYTES = 14336.0  # a token
COSTS: dict[str, OpCost] = {
    "norm": ComputeCost(3e-6, 5e-9),
    "work": ComputeCost(20e-6, 0.25e-6, 60e-6),
    "send": CommCost(25e-6, 0.2e-6 / BYTES, BYTES),
}


class Size(NamedTuple):
    """A step's size."""

    layers: int = 61
    ops: int = 9
    micro_batches: int = 2

    @property
    def units(self) -> int:
        """Ops in the step."""
        return self.layers * self.ops * self.micro_batches


class Figure(NamedTuple):
    """What a stage takes: seconds, and the peak of bytes, if that was measured."""

    seconds: float
    peak: int | None


AXES = {
    "layers": [Size(layers=layers) for layers in (1, 10, 61, 250, 1000)],
    "ops a layer": [Size(ops=ops) for ops in (3, 9, 27)],
    "micro-batches": [Size(micro_batches=number) for number in (2, 3, 4, 8)],
}
MODERATE = Size()
PLANNING = "planning"
SIZE_HEADER = ("layers x ops, in micro-batches", "ops")  # stages follow
MAX_TRACED_OPS = 3 * MODERATE.units  # of planning
RUNS, PATIENCE = 5, 1.0  # of a stage; seconds after which there is no further run
SIZES = list(dict.fromkeys(size for sizes in AXES.values() for size in sizes))
Stages = dict[str, Callable[[], object]]
Figures = dict[Size, dict[str, Figure]]


def record_layers(layers: int, ops: int) -> Program:
    """Return a program of so many layers of so many ops, a third of which communicates."""
    p = ProgramBuilder()
    x = residual = p.input("x")
    for index in range(layers):
        with p.layer(index):
            for part in range(ops // 3):
                x, residual = p.compute(f"norm{part}", do_nothing_twice, x, residual, outputs=2)
                x = p.compute(f"work{part}", do_nothing, x, ordered=True)
                x = p.comm(f"send{part}", do_nothing, x, overwrites=(x,))
    return p.build(x)


def make_costs(size: Size) -> CostTable:
    """Return costs as a file has them: measured with a few layers, and stretched to all."""
    few = record_layers(2, size.ops)
    costs = {op.name: COSTS[op.name.rstrip("0123456789")] for op in few.ops}
    provenance = Provenance("modelled", "bench_scale.py", "2026-11-22", {}, {}, {}, {})
    return set_layers(CostTable(provenance, describe_program(few), costs, {}, HostCost(issue=5e-6), {}), (size.layers,))


def make_stages(size: Size) -> Stages:
    """Return what is measured at a size, by name."""
    table, config = make_costs(size), RuntimeConfig(mode="always", micro_batches=size.micro_batches)
    programs = [record_layers(size.layers, size.ops)] * size.micro_batches
    order, device = alternate(programs), FreeDevice()
    schedule = lower(programs, order)
    executor = Executor(schedule, device, EventTable(device))
    return {
        "recording": lambda: record_layers(size.layers, size.ops),
        "order, lowering": lambda: lower(programs, alternate(programs)),
        "validation": lambda: validate(schedule),
        PLANNING: lambda: Planner(build_program(table.program), table).choose(PROMPT, config),
        "issuing": lambda: executor.run([(None,)] * size.micro_batches),
    }


def measure(stage: Callable[[], object], measures_memory: bool) -> Figure:
    """Run a stage several times, and once more with an eye on its memory."""
    seconds: list[float] = []
    while len(seconds) < RUNS and sum(seconds) < PATIENCE:
        start = time.thread_time()
        stage()
        seconds.append(time.thread_time() - start)
    return Figure(min(seconds), find_peak(stage) if measures_memory else None)


def find_peak(stage: Callable[[], object]) -> int:
    """Return the peak of bytes that a stage allocates."""
    tracemalloc.start()
    try:
        stage()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.fixture(scope="module")
def figures() -> Figures:
    """What each stage takes at each size."""
    return {
        size: {
            name: measure(stage, name != PLANNING or size.units <= MAX_TRACED_OPS)
            for name, stage in make_stages(size).items()
        }
        for size in SIZES
    }


def find_growth(figures: Figures, stage: str, axis: str, part: str) -> float | None:
    """Return by how much more an op costs at the largest size of an axis than at the moderate one."""
    measured = [size for size in AXES[axis] if getattr(figures[size][stage], part) is not None]
    if measured[-1] == MODERATE:
        return None
    large, moderate = (getattr(figures[size][stage], part) / size.units for size in (measured[-1], MODERATE))
    return float(large / moderate)


def describe(figure: Figure) -> str:
    peak = "-" if figure.peak is None else f"{figure.peak / 1e6:.2f} MB"
    return f"{figure.seconds * 1e3:.2f} ms, {peak}"


def tabulate_sizes(figures: Figures) -> list[str]:
    rows = [
        [f"{size.layers} x {size.ops}, in {size.micro_batches}", size.units, *map(describe, figures[size].values())]
        for size in SIZES
    ]
    return make_table([*SIZE_HEADER, *figures[MODERATE]], rows)


def tabulate_growth(figures: Figures) -> list[str]:
    """Return the growth of time and memory for each op, by axis and stage."""

    def describe_growth(stage: str, axis: str) -> str:
        parts = (find_growth(figures, stage, axis, part) for part in Figure._fields)
        return ", ".join("-" if growth is None else f"{growth:.2f}x" for growth in parts)

    rows = [
        [f"{getattr(AXES[axis][-1], field)} {axis}", *(describe_growth(stage, axis) for stage in figures[MODERATE])]
        for axis, field in zip(AXES, Size._fields, strict=True)
    ]
    return make_table(["an op, time and memory", *figures[MODERATE]], rows)


def test_figures_of_all_sizes(publish: Publish, figures: Figures) -> None:
    growths = list_growths(figures)
    worst = max(growths, key=lambda key: growths[key])
    verdict = "Reached" if growths[worst] <= MAX_GROWTH else "**Missed**"
    target = (
        f"- Target: no op costs more than {MAX_GROWTH:.0f} times what it costs at {MODERATE.layers} layers of "
        f"{MODERATE.ops} ops in {MODERATE.micro_batches} micro-batches. {verdict}: at most {growths[worst]:.2f} times "
        f"({worst[0]}, {worst[2]}, against {worst[1]})."
    )
    publish("scale", find_command(__file__), [*tabulate_sizes(figures), "", *tabulate_growth(figures), "", target])


def list_growths(figures: Figures) -> dict[tuple[str, str, str], float]:
    """Return each growth that is known, by stage, axis and part."""
    keys = [(stage, axis, part) for stage in figures[MODERATE] for axis in AXES for part in Figure._fields]
    return {key: growth for key in keys if (growth := find_growth(figures, *key)) is not None}


def test_an_op_costs_no_more_in_a_larger_step(figures: Figures) -> None:
    too_much = {key: growth for key, growth in list_growths(figures).items() if growth > MAX_GROWTH}
    assert not too_much
