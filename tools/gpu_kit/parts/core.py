"""The core on the device, without vLLM: are schedules right, what do they cost the host, and how near is the bound?"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch

from dbo_runtime.devices.virtual import simulate
from dbo_runtime.engine.event_table import EventTable
from dbo_runtime.engine.executor import Executor
from dbo_runtime.engine.generated_executor import GeneratedExecutor
from dbo_runtime.ir.lowering import lower
from dbo_runtime.ir.policies import alternate, get_policy, sequential
from dbo_runtime.planner.search.bound import compute_bound_of

from ..machine import get_scale
from .decoder import MICRO_BATCHES, SIZES, Decoder
from .findings import Findings, run_part, say_absent

SHARES = (0.25, 0.5, 1.0, 2.0)  # of the time of computation, that communication takes
POLICIES = (("sequential", 1), ("alternate", 1), ("staggered", 1), ("staggered", 2))
ROUNDS = {"chip": 15, "cpu": 3, "npu": 3}
MOST_ELEMENTS = 8  # times those of a tensor, that a reduce sends
CAPTURING = ("cuda", "npu")


def run(findings: Findings, device: str, _: list[str]) -> None:
    """Run all checks and measurements of the core."""
    core = Core(device)
    findings.note("sizes", vars(core.decoder.size))
    findings.attempt("equal to the loop, to the bit", core.compare)
    findings.attempt("us an instruction of empty ops", core.measure_host)
    for share in SHARES:
        findings.attempt(f"communication {share} of computation", partial(core.measure_share, share))
    findings.attempt("graph", core.capture if device in CAPTURING else lambda: say_absent("it captures no graphs"))


class Core:
    """A decoder on a device, and what is asked of it."""

    def __init__(self, device: str) -> None:
        self.decoder = Decoder(device, SIZES[get_scale(device)])
        self._name = device
        self._rounds = ROUNDS[get_scale(device)]
        self._sized: tuple[float, float] | None = None

    def compare(self) -> dict[str, bool]:
        """Compare each order with a plain loop, bit by bit, with nothing sent and with everything sent.

        Raises:
            AssertionError: if one differs.
        """
        equal = {}
        for (policy, lead), elements in product(POLICIES, (0, self.decoder.all_elements)):
            self.decoder.elements = elements
            executor = self.decoder.prepare(get_policy(policy, lead))
            expected = self.decoder.compute_in_turn()
            found = [self.decoder.compute(executor) for _ in range(self._rounds)]
            name = f"{policy}:{lead}, {'everything' if elements else 'nothing'} sent"
            equal[name] = all(all(map(torch.equal, each, expected)) for each in found)
        assert all(equal.values()), f"different: {[name for name, is_equal in equal.items() if not is_equal]}"
        return equal

    def measure_host(self) -> dict[str, Any]:
        """Measure what the host needs to issue ops that do nothing."""
        device = self.decoder.device
        bench = importlib.import_module("tests.benchmarks.bench_core")
        programs = [bench.record_decoder(bench.LAYERS)] * MICRO_BATCHES
        executor = GeneratedExecutor(lower(programs, alternate(programs)), device, EventTable(device))
        _, seconds = self.decoder.measure(lambda: executor.run([(None,)] * MICRO_BATCHES), self._rounds)
        count = len(executor.schedule.instructions)
        found = {"layers": bench.LAYERS, "instructions": count, "us": round(seconds * 1e6 / count, 3)}
        if hasattr(device, "backend") and importlib.util.find_spec("pytest"):
            rigs = importlib.import_module("tests.support.devices.rigs")  # which needs pytest
            with rigs.count_switches(device) as switches:
                executor.run([(None,)] * MICRO_BATCHES)
            found["stream switches"] = len(switches)
        return found

    def measure_share(self, share: float) -> dict[str, Any]:
        """Measure what overlap gains where communication takes this share of the time of computation.

        How long each op takes while no other runs says how long the schedule would take if nothing slowed another
        down, and the bound of any schedule (`dbo_runtime.planner.search.bound`).
        """
        decoder, one, both = self.decoder, self._prepare(sequential), self._prepare(alternate)
        compute, per_element = self._size_communication(one)
        wanted = int(share * compute / decoder.reduces / max(per_element, 1e-15))
        decoder.elements = min(wanted, MOST_ELEMENTS * decoder.all_elements)
        serial, _ = decoder.measure(lambda: one.run(decoder.inputs), self._rounds)
        overlapped, issued = decoder.measure(lambda: both.run(decoder.inputs), self._rounds)
        communicate = max(serial - compute, 0.0)
        apart, timeline = decoder.record(one), decoder.record(both)
        taken = {(span.op, span.micro_batch): span.end - span.start for span in apart.spans}
        predicted = simulate(both.schedule, lambda each: taken[each.op.label, each.issue.micro_batch]).duration
        bound = compute_bound_of(apart, one.schedule)
        hidden, busy = timeline.overlap("compute", "comm"), timeline.busy("comm")
        return {
            "ms computing": milliseconds(compute),
            "ms communicating": milliseconds(communicate),
            "ms one after the other": milliseconds(serial),
            "ms overlapped": milliseconds(overlapped),
            "ms predicted": milliseconds(predicted),
            "ms at the bound": milliseconds(bound),
            "gain": round(serial / overlapped, 3),
            "gain at the bound": round(serial / bound, 3),
            "share hidden": round(hidden / max(busy, 1e-12), 3),
            "ms to issue": milliseconds(issued),
            "us an instruction": round(issued * 1e6 / len(both.schedule.instructions), 2),
        }

    def capture(self) -> dict[str, Any]:
        """Capture a schedule into a graph; compare what a replay gives and costs the host.

        Raises:
            AssertionError: if a replay gives something else.
        """
        decoder = self.decoder
        decoder.elements = decoder.all_elements
        executor = self._prepare(alternate)
        expected = decoder.compute(executor)
        graph, outputs = decoder.capture(executor)
        graph.replay()
        decoder.synchronize()
        equal = all(torch.equal(one.cpu(), other) for (one,), other in zip(outputs, expected, strict=True))
        assert equal, "a replay gives other results than the run that was captured"
        _, issued = decoder.measure(lambda: executor.run(decoder.inputs), self._rounds)
        _, replayed = decoder.measure(graph.replay, self._rounds)
        return {"equal": equal, "ms to issue": milliseconds(issued), "ms to replay": milliseconds(replayed)}

    def _prepare(self, policy: Callable[..., Any]) -> Executor:
        return self.decoder.prepare(policy)

    def _size_communication(self, one: Executor) -> tuple[float, float]:
        """Return the seconds of computation, and those of sending one element; they are measured once."""
        if self._sized is None:
            decoder = self.decoder
            decoder.elements = 0
            compute, _ = decoder.measure(lambda: one.run(decoder.inputs), self._rounds)
            decoder.elements = decoder.all_elements
            whole, _ = decoder.measure(lambda: one.run(decoder.inputs), self._rounds)
            self._sized = compute, (whole - compute) / (decoder.reduces * decoder.all_elements)
        return self._sized


def milliseconds(seconds: float) -> float:
    """Return milliseconds, rounded to microseconds."""
    return round(seconds * 1e3, 3)


if __name__ == "__main__":
    run_part(run)
