"""What ranges for profilers cost a step: nothing where no profiler is on, and how much where one is.

    python -m pytest tests/benchmarks/bench_ranges.py -q -s

The step is that of a decoder of 61 layers of 9 ops in 2 micro-batches, whose ops do nothing, on streams that cost
nothing: what is left is the host's work. Without ranges at all means that the step does not even look for a profiler.
Figures are those of the fastest of many rounds, in turns, so that what else the machine does counts little.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dbo_runtime.batch import BatchSlice
from dbo_runtime.engine.event_table import EventTable
from dbo_runtime.engine.execution_plan import ExecutionPlan
from dbo_runtime.engine.generated_executor import GeneratedExecutor
from dbo_runtime.ir.render import digest
from dbo_runtime.observe.ranges import open_step
from tests.benchmarks.bench_core import LAYERS, MICRO_BATCHES, plan, record_decoder
from tests.benchmarks.handovers import FreeStreams
from tests.benchmarks.rounds import time_in_turns
from tests.support.page import Publish, find_command, make_table

torch = pytest.importorskip("torch")

ROUNDS = 500
PROFILED_ROUNDS = 10
MAX_RATIO = 1.02
BARE, OFF, ON = "without ranges at all", "no profiler is on", "torch's profiler is on"


def make_modes() -> tuple[dict[str, Callable[[], object]], int]:
    """Return a step that looks for profilers and one that does not, and the number of ops."""
    schedule = plan([record_decoder(LAYERS)] * MICRO_BATCHES)
    device = FreeStreams().make_device()
    executor = GeneratedExecutor(schedule, device, EventTable(device))
    slices = tuple(BatchSlice(number, number + 1, number, number + 1) for number in range(MICRO_BATCHES))
    step = ExecutionPlan(slices, executor, digest(schedule))
    inputs = [(None,)] * MICRO_BATCHES

    def run() -> None:
        """Do what `MicroBatchRuntime.run` does."""
        ranges = device.find_ranges("auto")
        with open_step(ranges, step):
            executor.run(inputs, open_range=ranges)

    return {BARE: lambda: executor.run(inputs), OFF: run}, len(schedule.instructions)


def test_ranges_cost_nothing_while_no_profiler_is_on(publish: Publish) -> None:
    modes, ops = make_modes()
    off = time_in_turns(modes, ROUNDS)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        on = time_in_turns(modes, PROFILED_ROUNDS)
    bare, looking, profiled = min(off[BARE]), min(off[OFF]), min(on[OFF])
    ratio, added = looking / bare, (profiled - min(on[BARE])) / ops
    rows = [
        [BARE, f"{bare * 1e3:.3f}", "1.00x"],
        [OFF, f"{looking * 1e3:.3f}", f"{ratio:.3f}x, {(looking - bare) * 1e6:.1f} us a step"],
        [ON, f"{profiled * 1e3:.2f}", f"{profiled / bare:.1f}x, {added * 1e6:.1f} us an op"],
    ]
    target = (
        f"- Target: at most {MAX_RATIO}x while no profiler is on. {'Reached' if ratio <= MAX_RATIO else '**Missed**'}."
    )
    publish("ranges", find_command(__file__), [*make_table(["profiler", "ms a step", "ratio"], rows), "", target])
    assert ratio <= MAX_RATIO
