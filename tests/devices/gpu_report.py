"""All that a machine with a GPU can prove, in one call, as a table:

    python tests/devices/gpu_report.py

It needs torch for CUDA, pytest, hypothesis, numpy and structlog. With `--device npu` the same runs on an NPU, or on the
stand-in for CANN in its place (`make setup-npu`), where it proves results and not speed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")  # the stand-in is to be loaded before torch_npu is

import torch

from dbo_runtime.devices import open_device
from dbo_runtime.errors import DeviceError
from dbo_runtime.events import EventTable
from dbo_runtime.executor import Executor, run_sequential
from dbo_runtime.generated_executor import GeneratedExecutor
from dbo_runtime.lowering import lower
from dbo_runtime.observe.timeline import Recorder
from dbo_runtime.policies import alternate, sequential
from dbo_runtime.program import Program, ProgramBuilder
from dbo_runtime.validate import validate
from tests.benchmarks.bench_core import LAYERS, record_decoder
from tests.devices import rigs

SUITES = tuple(f"tests/devices/test_{name}.py" for name in ("contract", "streams", "races", "graphs"))
GRAPHS = {"cuda": "CUDAGraph", "npu": "NPUGraph"}
SHOWN = 5  # tests that failed
WIDTH = 36  # of the first column
LONGEST = 240  # seconds that a suite may take
Row = tuple[str, str]


def main() -> int:
    """Run everything and print the table; 1 if something failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=rigs.STREAMS, default="cuda")
    parser.add_argument("--tokens", type=int, default=4096, help="of a micro-batch")
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=20, help="of each measurement")
    arguments = parser.parse_args()
    try:
        report = Report(arguments.device, arguments.tokens, arguments.hidden, arguments.rounds)
    except DeviceError as error:
        print(f"nothing to report: {error}", file=sys.stderr)
        return 1
    print(f"| {'what':<{WIDTH}} | result |\n|{'-' * (WIDTH + 2)}|---|")
    for name, value in report.rows():
        print(f"| {name:<{WIDTH}} | {value} |", flush=True)
    return int(report.failed)


class Report:
    """The rows of the table, part by part.

    The communication here is a copy to the host and back, because there is one GPU only. It takes a copy
    engine and no multiprocessor; collectives of NCCL take some, so what is gained here is the most that could be.
    """

    def __init__(self, name: str, tokens: int, hidden: int, rounds: int) -> None:
        rigs.prepare(name)
        self.failed = False
        self.parts: tuple[Callable[[], Iterator[Row]], ...] = (
            self.describe,
            self.run_suites,
            self.compare_results,
            self.measure_overlap,
            self.capture,
            self.measure_host,
        )
        self._name = name
        self._device: Any = open_device(name)
        self._rounds = rounds
        self._weight = torch.randn(hidden, hidden, dtype=torch.bfloat16).to(name) / hidden**0.5
        self._buffer = torch.empty(tokens, hidden, dtype=torch.bfloat16).pin_memory()
        self._inputs = [(torch.randn(tokens, hidden, dtype=torch.bfloat16).to(name),) for _ in range(2)]
        self._program = self._record(layers=8)

    def rows(self) -> Iterator[Row]:
        """Run part after part; what fails is a row, too, and the others follow."""
        for part in self.parts:
            try:
                yield from part()
            except Exception as error:  # noqa: BLE001 - whatever a device raises: the rest is still to be seen
                self.failed = True
                yield part.__name__, f"FAILED: {type(error).__name__}: {error}"

    def describe(self) -> Iterator[Row]:
        """Name the device."""
        yield "device", f"{self._name}: {self._device.backend.get_device_name(0)}, torch {torch.__version__}"

    def run_suites(self) -> Iterator[Row]:
        """Run the tests of devices, in a process of their own."""
        for suite in SUITES:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "report.xml"
                options = ("-q", "-p", "no:cacheprovider", "-o", "junit_family=xunit1", f"--junitxml={path}")
                call = [sys.executable, "-m", "pytest", *options, suite]
                done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, timeout=LONGEST, check=False)
                if not path.is_file():
                    self.failed = True
                    yield suite, f"could not be run: {done.stdout[-300:]}{done.stderr[-300:]}"
                    continue
                cases = [case for case in ElementTree.parse(path).iter("testcase") if self._is_ours(case)]
            bad = [
                case.get("name") for case in cases if case.find("failure") is not None or case.find("error") is not None
            ]
            skipped = sum(case.find("skipped") is not None for case in cases)
            self.failed |= bool(bad)
            counts = f"{len(cases) - len(bad) - skipped} passed, {len(bad)} failed, {skipped} skipped"
            yield suite, ", ".join([counts, *map(str, bad[:SHOWN])])

    def compare_results(self) -> Iterator[Row]:
        """Compare an overlapped run with the sequential loop, bit by bit."""
        expected = run_sequential([self._program] * 2, self._inputs)
        outputs = self._prepare(alternate).run(self._inputs)
        self._device.synchronize()
        equal = all(torch.equal(one.cpu(), other.cpu()) for (one,), (other,) in zip(outputs, expected, strict=True))
        self.failed |= not equal
        yield "overlapped and sequential results", "equal" if equal else "DIFFERENT"

    def measure_overlap(self) -> Iterator[Row]:
        """Measure copies concurrent to matrix multiplications, as a ratio within one run."""
        ways = {"sequential": self._prepare(sequential), "overlapped": self._prepare(alternate)}
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(self._rounds):
            for way, executor in ways.items():
                seconds[way].append(self._measure(lambda executor=executor: executor.run(self._inputs)))
        recorder = Recorder()
        ways["overlapped"].run(self._inputs, instrument=recorder)
        timeline = recorder.timeline()
        both = timeline.overlap("compute", "comm")
        before, after = (median(seconds[way][1:]) for way in ("sequential", "overlapped"))
        yield "copies and matmuls", f"{before * 1e3:.2f} ms one after the other, {after * 1e3:.2f} ms overlapped"
        yield "ratio (an upper bound)", f"{before / after:.2f}"
        share = both / max(timeline.busy("comm"), 1e-12)
        yield "copying hidden behind computing", f"{share:.0%} of {timeline.busy('comm') * 1e3:.2f} ms"
        self.failed |= both <= 0

    def capture(self) -> Iterator[Row]:
        """Capture a schedule into a graph, and compare what a replay gives and costs the host."""
        executor = self._prepare(alternate)
        expected = [tensor.cpu() for (tensor,) in executor.run(self._inputs)]
        self._device.synchronize()
        graph = getattr(self._device.backend, GRAPHS[self._name])()
        with self._device.backend.graph(graph, stream=self._device.backend.Stream()):
            outputs = executor.run(self._inputs)
        graph.replay()
        self._device.synchronize()
        equal = all(torch.equal(one.cpu(), other) for (one,), other in zip(outputs, expected, strict=True))
        self.failed |= not equal
        yield "replay of a captured schedule", "equal" if equal else "DIFFERENT"
        issued, replayed = (self._measure_host(run) for run in (lambda: executor.run(self._inputs), graph.replay))
        yield "host, for a step", f"{issued * 1e3:.3f} ms issued, {replayed * 1e3:.3f} ms replayed"

    def measure_host(self) -> Iterator[Row]:
        """Measure what ops that do nothing cost the host."""
        programs = [record_decoder(LAYERS)] * 2
        executor = GeneratedExecutor(lower(programs, alternate(programs)), self._device, EventTable(self._device))
        seconds = self._measure_host(lambda: executor.run([(None,)] * 2))
        with rigs.count_switches(self._device) as switches:
            executor.run([(None,)] * 2)
        ops = len(executor.schedule.instructions)
        yield (
            f"host, {LAYERS} layers of empty ops",
            f"{seconds * 1e3:.2f} ms: {ops} ops, {len(switches)} stream switches",
        )

    def _is_ours(self, case: ElementTree.Element) -> bool:
        name = case.get("name", "")
        return not any(f"{left}{other}" in name for other in rigs.NAMES if other != self._name for left in "[-")

    def _record(self, layers: int) -> Program:
        p = ProgramBuilder()
        x = p.input("x")
        for index in range(layers):
            with p.layer(index):
                x = p.compute("matmul", self._multiply, x)
                x = p.comm("copy", self._copy, x, exclusive="buffer")
        return p.build(x)

    def _multiply(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self._weight

    def _copy(self, x: torch.Tensor) -> torch.Tensor:
        self._buffer.copy_(x, non_blocking=True)
        return torch.empty_like(x).copy_(self._buffer, non_blocking=True)

    def _prepare(self, policy: Any) -> Executor:
        programs = [self._program] * 2
        schedule = lower(programs, policy(programs))
        validate(schedule)
        return GeneratedExecutor(schedule, self._device, EventTable(self._device))

    def _measure(self, run: Callable[[], Any]) -> float:
        self._device.synchronize()
        start = time.perf_counter()
        run()
        self._device.synchronize()
        return time.perf_counter() - start

    def _measure_host(self, run: Callable[[], Any]) -> float:
        seconds = []
        for _ in range(self._rounds):
            self._device.synchronize()
            start = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - start)
        self._device.synchronize()
        return median(seconds)


if __name__ == "__main__":
    sys.exit(main())
