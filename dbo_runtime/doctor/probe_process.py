"""Run the probe in a process of its own: a broken package is then a finding like any other."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from dbo_runtime.doctor.probe import MARK

TIMEOUT_SECONDS = 300.0  # a first import of vLLM from a slow disk takes minutes
MAX_ERROR_CHARACTERS = 400


def run_probe(subject: str, environ: Mapping[str, str], *arguments: str, **variables: str) -> dict[str, Any]:
    """Return the facts that `probe` prints about *subject*, or `error`: why it printed none. Never raises.

    A subject may take *arguments*.

    The process sees the packages that this one sees, and *environ* with *variables* on top.
    """
    path = os.pathsep.join(map(os.path.abspath, sys.path))
    env = {**environ, "PYTHONPATH": path, **variables}
    command = [sys.executable, "-m", "dbo_runtime.doctor.probe", subject, *arguments]
    try:
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {TIMEOUT_SECONDS:.0f} s"}
    answers = [line.removeprefix(MARK) for line in done.stdout.splitlines() if line.startswith(MARK)]
    facts: dict[str, Any] = json.loads(answers[-1]) if answers else {"error": _describe_end(done)}
    if "error" in facts:
        facts["error"] = _shorten(facts["error"])
    return facts


def _describe_end(done: subprocess.CompletedProcess[str]) -> str:
    if done.returncode < 0:
        return f"the process that imported it was ended by {signal.Signals(-done.returncode).name}"
    last = done.stderr.strip().splitlines()[-1:]
    return f"the process that imported it ended with {done.returncode}: {' '.join(last)}"


def _shorten(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MAX_ERROR_CHARACTERS else f"{line[:MAX_ERROR_CHARACTERS]} ..."
