"""The tests of devices, one file of them, on the device alone: by pytest, where that is installed."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from ..machine import ROOT
from ..plan import DEVICES
from .findings import Findings, run_part, say_absent

NEEDED = ("pytest", "hypothesis")
OTHERS = {"cuda": ("cpu", "virtual", "npu"), "cpu": ("virtual", "npu", "cuda"), "npu": ("cpu", "virtual", "cuda")}
SHOWN = 5  # tests that failed
# Newer options of this project's are left out for a pytest that is older: what it lacks is told, not guessed.
OPTIONS = ("-q", "-p", "no:cacheprovider", "-o", "minversion=8.0", "-o", "junit_family=xunit1", "-o", "addopts=")


def run(findings: Findings, device: str, words: list[str]) -> None:
    """Run a file of tests, and count them by outcome."""
    assert device in DEVICES
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        findings.note("tests", say_absent(f"{', '.join(missing)} is not installed; `measured` has checks of its own"))
        return
    (suite,) = words
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        call = [sys.executable, "-m", "pytest", *OPTIONS, "--import-mode=importlib", f"--junitxml={report}", suite]
        done = subprocess.run(call, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)
        counts, bad = count_outcomes(report, device) if report.is_file() else ({}, [])
    has_streams = device != "cpu"
    if not has_streams and counts.get("passed") == 0:
        findings.note("tests", say_absent("these are tests of streams"))
        return
    findings.note("tests", counts)
    if not counts.get("passed"):
        findings.fail(f"pytest ended with {done.returncode} and has run nothing on {device}")
    if bad:
        findings.fail(f"{len(bad)} failed: {', '.join(bad[:SHOWN])}")


def count_outcomes(report: Path, device: str) -> tuple[dict[str, int], list[str]]:
    """Return how many tests of a device passed, failed and were skipped, and the names of those that failed."""
    cases = [case for case in ElementTree.parse(report).iter("testcase") if is_of(case.get("name", ""), device)]
    bad = [case.get("name", "") for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = sum(case.find("skipped") is not None for case in cases)
    passed = len(cases) - len(bad) - skipped
    return ({"passed": passed, "failed": len(bad), "skipped": skipped} if cases else {}), bad


def is_of(name: str, device: str) -> bool:
    """Return whether a test, such as `test_it[cuda-1]`, is not one of another device."""
    words = re.split(r"[\[\]-]", name)
    return not any(other in words[1:] for other in OTHERS[device])


if __name__ == "__main__":
    run_part(run)
