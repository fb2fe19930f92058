"""Run the parts of the kit, each with a limit, and keep what was found: see docs/devices.md.

    python -m tools.gpu_kit.runner [--device cuda|cpu|npu] [PART | PART/JOB ...]

`run.sh` calls it on the machine with the GPU, in the environment that it sets. Standard library only: what is broken
there must not break what reports it.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import Any

from .machine import ROOT, find_machine
from .plan import DEVICES, PARTS, Job, Part, PlanError, choose_parts
from .processes import run_process
from .record import NOT_HERE, Record, read_outcome, tell

SECONDS = 500.0  # for all parts together
LEAST_SECONDS = 15.0  # with less left, no job is begun
RESERVE_SECONDS = 4.0  # to end the last job and to write
ENDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Runner:
    """Runs parts in order; those that measure no times run side by side.

    Args:
        record: takes what is found.
        device: a name of `DEVICES`.
        seconds: for everything.
        began: when they began to count, by `time.time`.
        at_once: processes that run side by side, at most.
        source: names the sources that are run.
        patience: times the limit that a job has on a GPU.
        make_words: returns the command of a job, given where it writes its result, and the device.
    """

    def __init__(
        self,
        record: Record,
        device: str,
        seconds: float,
        began: float,
        at_once: int,
        source: str = "",
        patience: float = 1.0,
        make_words: Callable[[Job, Path, str], list[str]] | None = None,
    ) -> None:
        self.stop = threading.Event()
        self._record = record
        self._device = device
        self._deadline = began + seconds
        self._room = threading.Semaphore(at_once)
        self._source = source
        self._patience = patience
        self._make_words = make_words or call_module

    def run(self, parts: Sequence[Part]) -> bool:
        """Run parts; return whether all of them went well."""
        went_well = True
        for batch in group_parts(parts):
            with ThreadPoolExecutor(len(batch)) as pool:
                went_well &= all(list(pool.map(self._run_part, batch)))
        return went_well

    def _count_left(self) -> float:
        return self._deadline - RESERVE_SECONDS - time.time()

    def _run_part(self, part: Part) -> bool:
        start = time.monotonic()
        went_well = True
        for wave in part.waves:
            if went_well or not part.builds_up:
                with ThreadPoolExecutor(len(wave)) as pool:
                    went_well &= all(list(pool.map(lambda job: self._run_job(part, job), wave)))
            else:
                self._note_skipped(part, wave)
        if part.name in self._record.parts:
            self._record.note_seconds(part.name, time.monotonic() - start, self._source)
        spent = time.monotonic() - start
        tell(f"{part.name}: {self._describe(part)} after {spent:.0f} s, {self._count_left():.0f} s left")
        return went_well

    def _run_job(self, part: Part, job: Job) -> bool:
        """Run a job when there is room for it; return whether it went well."""
        reason = job.absent.get(self._device)
        if reason is not None:
            outcome = {"seconds": 0.0, "exit": 0, "failed": None, "results": f"{NOT_HERE}{reason}"}
            self._record.note_job(part.name, job.name, outcome)
            return True
        with self._room:
            left = self._count_left()
            if left < LEAST_SECONDS or self.stop.is_set():
                return self._leave_out(part, job, "no time left" if not self.stop.is_set() else "the run was ended")
            result, log = self._record.get_paths(part.name, job.name)
            result.unlink(missing_ok=True)
            limit = min(job.limit * self._patience, left)
            words = self._make_words(job, result, self._device)
            environment = {**os.environ, "GPU_KIT_KEEP": str(self._record.keep), **job.environment}
            ending = run_process(words, environment, log, limit, self.stop)
        outcome = read_outcome(ending, result, log)
        self._record.note_job(part.name, job.name, outcome)
        if outcome["failed"]:
            tell(f"{part.name}/{job.name}: {outcome['failed']}")
        return not outcome["failed"]

    def _leave_out(self, part: Part, job: Job, reason: str) -> bool:
        """Note that a job was not run, unless it was before: then its results stay."""
        tell(f"{part.name}/{job.name}: {reason}")
        if job.name not in self._record.parts.get(part.name, {}).get("jobs", {}):
            self._record.note_job(part.name, job.name, {"seconds": 0.0, "exit": None, "failed": reason, "results": {}})
        return False

    def _note_skipped(self, part: Part, wave: Sequence[Job]) -> None:
        for job in wave:
            self._leave_out(part, job, "left out, because what it builds on failed")

    def _describe(self, part: Part) -> str:
        failed = self._record.parts.get(part.name, {}).get("failed")
        return "FAILED" if failed else "went well"


def call_module(job: Job, result: Path, device: str) -> list[str]:
    """Return the command that runs a job's module."""
    module, *more = job.words
    return [sys.executable, "-m", f"tools.gpu_kit.parts.{module}", str(result), device, *more]


def group_parts(parts: Sequence[Part]) -> Iterator[list[Part]]:
    """Yield parts that run side by side: those that measure times are alone."""
    for is_timed, group in groupby(parts, key=lambda part: part.is_timed):
        if is_timed:
            yield from ([part] for part in group)
        else:
            yield list(group)


def main(arguments: Sequence[str] | None = None, parts: Sequence[Part] = PARTS) -> int:
    """Run what is asked for; 1 if something failed, 2 if there is nothing to run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=DEVICES, default="cuda", help="cpu and npu rehearse")
    parser.add_argument("parts", nargs="*", metavar="PART", help="or PART/JOB; all without any")
    options = parser.parse_args(arguments)
    work = Path(os.environ.get("KIT_WORK", ROOT / "build" / "gpu_kit" / options.device))
    began = float(os.environ.get("KIT_BEGAN", time.time()))
    try:
        chosen = choose_parts(options.parts, parts)
        record = Record(work, Path(os.environ.get("OUT", work / "out")))
    except (PlanError, OSError) as error:
        tell(str(error))
        return 2
    machine: dict[str, Any] = find_machine(options.device)
    record.note_machine(machine)
    if machine["problem"]:
        tell(machine["problem"])
        return 2
    seconds, at_once = float(os.environ.get("KIT_SECONDS", SECONDS)), max(2, os.cpu_count() or 2)
    patience = float(os.environ.get("KIT_PATIENCE", 1.0))
    runner = Runner(record, options.device, seconds, began, at_once, machine["source"], patience)
    for number in ENDED:
        signal.signal(number, lambda *_: runner.stop.set())
    went_well = runner.run(chosen)
    record.write()
    return 0 if went_well and record.is_complete else 1


if __name__ == "__main__":
    sys.exit(main())
