"""Is memory of one stream freed while another still reads it? CUDA's own allocator and compute-sanitizer can tell.

torch's caching allocator hides such faults from every tool: to the driver its memory is one piece. With
`backend:cudaMallocAsync` each tensor is allocated and freed by the driver in the order of its stream, and memcheck
tracks these orders. (racecheck sees shared memory only.) A fault that is planted shows that it would be seen.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from dbo_runtime.ir.policies import alternate, get_policy

from ..machine import get_scale
from .decoder import SMALL, Decoder
from .findings import Findings, run_part, say_absent
from .smoke import find_program

SANITIZER = "compute-sanitizer"
SEEN = 9  # the exit status when it has found something
EXPECTED = {"schedules": 0, "fault": SEEN}
# Calls of the driver that fail are not looked for: torch asks for functions that a driver may not have, and its answer
# would count as an error, in schedules as in the fault.
OPTIONS = (
    "--tool", "memcheck", "--track-stream-ordered-races", "all", "--report-api-errors", "no", "--show-backtrace", "no",
    "--error-exitcode", str(SEEN),
)  # fmt: skip
BACKEND = "cudaMallocAsync"
WATCHED = "watched"
TAIL = 12  # lines of its report
RUNS = 3
BUSY_CYCLES = 200_000_000  # for which a reader waits, so that it reads after the free


def run(findings: Findings, device: str, words: list[str]) -> None:
    """Run schedules as they are, or the planted fault, under the sanitizer where there is one."""
    what, *more = words
    if more:
        check_allocator(device)
        {"schedules": run_schedules, "fault": plant_fault}[what](findings, device)
        return
    program = find_program(SANITIZER) if device == "cuda" else None
    if what == "fault" and program is None:
        reason = f"{SANITIZER} is not installed" if device == "cuda" else f"{SANITIZER} needs CUDA"
        findings.note("watched by", say_absent(reason))
        return
    findings.note("watched by", SANITIZER if program is not None else "nothing")
    watch(findings, program, device, what)


def check_allocator(device: str) -> None:
    """Check that CUDA's own allocator is used: with torch's, nothing would be seen, and nothing proven.

    Raises:
        AssertionError: if it is not.
    """
    if device == "cuda":
        backend = torch.cuda.get_allocator_backend()
        assert backend == BACKEND, f"memory is allocated by {backend}, which hides from the sanitizer what is freed"


def watch(findings: Findings, program: str | None, device: str, what: str) -> None:
    """Run this file as another process, under the sanitizer if there is one; it must end as expected."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", __spec__.name, str(Path(folder) / "frees.json"), device, what, WATCHED]
        watched = words if program is None else [program, *OPTIONS, *words]
        allocator = {"PYTORCH_CUDA_ALLOC_CONF": f"backend:{BACKEND}"} if device == "cuda" else {}
        done = subprocess.run(watched, env={**os.environ, **allocator}, capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr)
    report = [line for line in done.stdout.splitlines() if line.startswith("=")][-TAIL:]
    findings.note("report", report)
    findings.note("exit", done.returncode)
    if done.returncode != EXPECTED[what]:
        said = (report or done.stderr.strip().splitlines())[-1:]
        findings.fail(f"it ended with {done.returncode}, not {EXPECTED[what]}: {' '.join(said)}")


def run_schedules(findings: Findings, device: str) -> None:
    """Run several orders of a small decoder a few times, and compare them with the plain loop."""
    decoder = Decoder(device, SMALL[get_scale(device)])
    decoder.elements = decoder.all_elements
    expected = decoder.compute_in_turn()
    for policy in (alternate, get_policy("staggered", 1)):
        executor = decoder.prepare(policy)
        for _ in range(RUNS):
            if not all(map(torch.equal, decoder.compute(executor), expected)):
                findings.fail("an overlapped run differs from the loop")
    findings.note("runs", RUNS)


def plant_fault(findings: Findings, device: str) -> None:
    """Free memory on the stream that owns it, while another stream is still to read it."""
    assert device == "cuda"
    cuda: Any = torch.cuda
    owner, reader = cuda.Stream(), cuda.Stream()
    with torch.cuda.stream(owner):
        x = torch.ones(1 << 20, device=device)
    reader.wait_stream(owner)
    with torch.cuda.stream(reader):
        cuda._sleep(BUSY_CYCLES)
        y = x + 1
    with torch.cuda.stream(owner):
        del x
        z = torch.zeros(1 << 20, device=device)
    torch.cuda.synchronize()
    findings.note("sum", float(y.sum() + z.sum()))


if __name__ == "__main__":
    run_part(run, ends_at_once=WATCHED not in sys.argv)  # the sanitizer reports when a process ends by itself
