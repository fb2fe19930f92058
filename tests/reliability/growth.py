"""Plan many distinct batches, and serve mixed load for long: what does not stay flat? `make growth` writes the page.

python -m tests.reliability.growth --minutes 30 --batches 100000 --write-page
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from dbo_runtime.batch import Batch
from dbo_runtime.config import RuntimeConfig
from dbo_runtime.decline import Decline
from dbo_runtime.devices.virtual import VirtualDevice
from dbo_runtime.engine.runtime import MicroBatchRuntime
from dbo_runtime.lab.whatif.published_cases import get_case
from dbo_runtime.observe.logs import open_log
from dbo_runtime.planner.costs.program_spec import build_program
from dbo_runtime.planner.online.correction import PERIOD_STEPS
from dbo_runtime.planner.online.planner import Planner
from tests.support.page import make_table, tell_section
from tests.support.reliability.page import PAGE
from tests.support.reliability.process_sizes import KIB, PROC
from tests.support.reliability.served_growth import ServedGrowth, serve_both

CASE = "a3-layer-4894"  # costs with some layers
WARM_SHARE = 0.1  # of the batches, in which memory may grow
MIB = 1 << 20


class PlannedGrowth(NamedTuple):
    """Memory while distinct batches are planned.

    Attributes:
        batches: planned.
        before, after: resident bytes after the warm-up, and at the end.
        caches: entries, and how many there may be, by name.
    """

    batches: int
    before: int
    after: int
    caches: dict[str, tuple[int, int]]


def main() -> None:
    """Measure, print, and write to the page if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=100_000)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--write-page", action="store_true", help="write the tables to docs/reliability.md")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dbo-growth-") as folder:
        served = serve_both(arguments.minutes, Path(folder))
    planned = plan_many(open_runtime(), arguments.batches)
    command = f"python -m tests.reliability.growth --minutes {arguments.minutes:g} --batches {arguments.batches}"
    lines = [*describe_planned(planned), "", *describe_served(served)]
    tell_section(arguments.write_page, "growth", command, lines, PAGE)


def open_runtime() -> MicroBatchRuntime:
    """Return a runtime that plans by published costs."""
    table = get_case(CASE).table
    program = build_program(table.program)
    runtime = MicroBatchRuntime(program, VirtualDevice(), RuntimeConfig(enabled=True), open_log(quiet=True))
    runtime.planner = Planner(program, table)
    runtime.prepare(runtime.config)
    return runtime


def plan_many(runtime: MicroBatchRuntime, count: int) -> PlannedGrowth:
    """Plan so many distinct batches; return what that left."""
    steps = serve(runtime, count)
    for _ in range(int(count * WARM_SHARE)):
        next(steps)
    before = measure_memory()
    for _ in steps:
        pass
    return PlannedGrowth(count, before, measure_memory(), runtime.describe_caches())


def serve(runtime: MicroBatchRuntime, count: int, seed: int = 0) -> Iterator[None]:
    """Decide so many steps, all of which differ from each other, and learn from times that are drawn at random."""
    chance, planner = random.Random(seed), runtime.planner
    assert planner is not None
    for number in range(count):
        yield
        batch = _make_batch(chance, number)
        plan = runtime.decline_early(batch.tokens) or runtime.plan(batch)
        if isinstance(plan, Decline):
            runtime.decline(plan)
        mode = "unsplit" if isinstance(plan, Decline) else "split"
        if plan.expected is not None:
            planner.memory.observe(mode, plan.expected, plan.expected * chance.uniform(0.8, 1.3), plan.trial_class)
        if number % PERIOD_STEPS == 0:
            planner.memory.apply([planner.memory.propose()])


def _make_batch(chance: random.Random, number: int) -> Batch:
    """Return prompts, decodes, or both."""
    prompts = [chance.randint(2, 4000) for _ in range(chance.randint(0, 3))]
    lengths = (*[1] * chance.randint(0 if prompts else 1, 200), *prompts)
    contexts = (number, *[chance.randint(0, 2000)] * (len(lengths) - 1))
    return Batch(lengths, sum(prompts), context_lens=contexts)


def measure_memory() -> int:
    """Return the resident bytes of this process."""
    status = (PROC / "self" / "status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) * KIB


def describe_planned(planned: PlannedGrowth) -> list[str]:
    """Return the lines of what planning left."""
    warm = f"after {WARM_SHARE:.0%} of them"
    memory = f"{planned.before / MIB:.1f} MiB resident {warm}, {planned.after / MIB:.1f} MiB at the end"
    return [
        f"{planned.batches} distinct batches planned by one runtime: {memory}. Entries of its caches, of at most: "
        f"{_describe_fullest(planned.caches)}.",
    ]


def _describe_fullest(caches: dict[str, tuple[int, int]]) -> str:
    return ", ".join(f"{name} {entries} of {most}" for name, (entries, most) in caches.items() if entries)


def describe_served(served: dict[str, ServedGrowth]) -> list[str]:
    """Return the lines of what the processes of servers held."""
    forms = {"memory": MIB, "shared": MIB, "threads": 1, "descriptors": 1}
    units = {"memory": "memory, MiB", "shared": "shared memory, MiB"}
    rows = []
    for server, growth in served.items():
        for name, unit in forms.items():
            first, last, slope = growth.measure(name)
            rows.append(
                (server, units.get(name, name), f"{first / unit:.1f}", f"{last / unit:.1f}", f"{slope / unit:+.4f}")
            )
    about = "; ".join(
        f"{server}: {growth.requests} requests, {growth.samples[-1][1].processes} processes"
        + (f", {growth.split} split steps" if growth.split else "")
        for server, growth in served.items()
    )
    minutes = next(iter(served.values())).minutes
    caches = next(iter(served.values())).caches
    full = "; ".join(f"{name} {entries} of {most}" for name, (entries, most) in caches.items() if entries)
    return [
        f"Tiny model, TP=2, one client with mixed requests for {minutes:g} minutes ({about}). Sums over all processes, "
        "after the first sixth of the time: medians of the first and of the last quarter, and the slope of a line "
        "through all samples.",
        "",
        *make_table(["server", "", "first", "last", "each minute"], rows),
        "",
        f"Entries of caches at the end, of at most: {full}.",
    ]


if __name__ == "__main__":
    main()
