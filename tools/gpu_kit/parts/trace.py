"""What torch's profiler records of a split step on the device, and what `dbo trace` reads from it."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from dbo_runtime.__main__ import main as run_program

from .engine import EVERY_STEP, Engine, get_work, keep
from .findings import Findings, run_part

LENGTHS = {"cuda": (1000, 1000), "cpu": (200, 200)}
MODEL = {"cuda": "wide", "cpu": "wide"}


def run(findings: Findings, device: str, _: list[str]) -> None:
    """Profile one prefill, and read the profile."""
    folder = get_work("profiles")
    profiler = {
        "profiler": "torch",
        "torch_profiler_dir": str(folder),
        "torch_profiler_with_stack": False,
        "ignore_frontend": True,
    }
    engine = Engine(MODEL[device], device, profiler_config=profiler)
    engine.configure(EVERY_STEP)
    engine.prefill(LENGTHS[device])
    engine.llm.start_profile()
    engine.prefill(LENGTHS[device])
    engine.llm.stop_profile()
    files = sorted(folder.glob("*.json.gz"))
    findings.note("files", {path.name: path.stat().st_size for path in files})
    if not files:
        findings.fail("the profiler wrote no file")
        return
    keep(files[0], "profile.pt.trace.json.gz")  # the recorded ones of this project are of CPUs and of one GPU
    findings.attempt("said", lambda: print_trace(files[0]).splitlines())
    findings.attempt("figures", lambda: check(json.loads(print_trace(files[0], "--json"))))


def print_trace(path: Path, *options: str) -> str:
    """Return what `dbo trace` prints.

    Raises:
        RuntimeError: if it fails.
    """
    printed = io.StringIO()
    with redirect_stdout(printed):
        status = run_program(["trace", str(path), *options])
    if status:
        raise RuntimeError(f"`dbo trace` exits with {status}: {printed.getvalue()[-300:]}")
    return printed.getvalue()


def check(figures: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of the profile's steps.

    Raises:
        AssertionError: if none has communication in it.
    """
    steps = [step for ranks in figures.values() for step in ranks.values()]
    assert any("comm" in json.dumps(step) for step in steps), f"no lane communicates in {len(steps)} steps"
    return figures


if __name__ == "__main__":
    run_part(run)
