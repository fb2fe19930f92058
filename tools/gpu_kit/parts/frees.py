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
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dbo_runtime.policies import alternate, get_policy

from .decoder import SMALL, Decoder
from .findings import Findings, run_part, say_absent
from .smoke import find_program

SANITIZER = "compute-sanitizer"
SEEN = 9  # the exit status when it has found something
OPTIONS = ("--tool", "memcheck", "--track-stream-ordered-races", "all", "--error-exitcode", str(SEEN))
ALLOCATOR = "backend:cudaMallocAsync"
TAIL = 12  # lines of its report
RUNS = 3
BUSY_CYCLES = 200_000_000  # for which a reader waits, so that it reads after the free


def run(findings: Findings, device: str, words: list[str]) -> None:
    """Run schedules as they are, then the planted fault, each under the sanitizer where there is one."""
    if words:
        {"schedules": run_schedules, "fault": plant_fault}[words[0]](findings, device)
        return
    program = find_program(SANITIZER) if device == "cuda" else None
    for what, expected in (("schedules", 0), ("fault", SEEN)):
        if what == "fault" and program is None:
            reason = f"{SANITIZER} is not installed" if device == "cuda" else f"{SANITIZER} needs CUDA"
            findings.note(what, say_absent(reason))
            continue
        findings.attempt(what, partial(check, program, device, what, expected))


def check(program: str | None, device: str, what: str, expected: int) -> dict[str, object]:
    """Run this file as another process, under the sanitizer if there is one.

    Raises:
        AssertionError: if it ends in another way than expected.
    """
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "tools.gpu_kit.parts.frees", str(Path(folder) / "frees.json"), device, what]
        watched = words if program is None else [program, *OPTIONS, *words]
        allocator = {"PYTORCH_CUDA_ALLOC_CONF": ALLOCATOR} if device == "cuda" else {}
        done = subprocess.run(watched, env={**os.environ, **allocator}, capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr)
    report = [line for line in done.stdout.splitlines() if line.startswith("=")][-TAIL:]
    said = report or done.stderr.strip().splitlines()[-1:]
    assert done.returncode == expected, f"{what} ended with {done.returncode}, not {expected}: {said}"
    watcher = SANITIZER if program is not None else "nothing watched"
    return {"exit": done.returncode, "watched by": watcher, "report": report}


def run_schedules(findings: Findings, device: str) -> None:
    """Run several orders of a small decoder a few times, and compare them with the plain loop."""
    decoder = Decoder(device, SMALL[device])
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
    run_part(run)
