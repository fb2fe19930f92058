"""Asks a process of its own, so that a package which is broken is a fact like any other."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from dbo_runtime.doctor.probe import MARK

PATIENCE = 300.0  # seconds; a first import of vLLM from a slow disk takes minutes
LONGEST = 400  # characters of an error that are shown


def ask(subject: str, environ: Mapping[str, str], **variables: str) -> dict[str, Any]:
    """Return what `probe` tells about *subject*, or `error`: why it did not. Never raises.

    The process sees the packages that this one sees, and *environ* with *variables* on top.
    """
    path = os.pathsep.join(map(os.path.abspath, sys.path))
    env = {**environ, "PYTHONPATH": path, **variables}
    words = [sys.executable, "-m", "dbo_runtime.doctor.probe", subject]
    try:
        done = subprocess.run(
            words, env=env, capture_output=True, text=True, errors="replace", timeout=PATIENCE, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {PATIENCE:.0f} s"}
    told = [line.removeprefix(MARK) for line in done.stdout.splitlines() if line.startswith(MARK)]
    facts: dict[str, Any] = json.loads(told[-1]) if told else {"error": _describe_end(done)}
    if "error" in facts:
        facts["error"] = _shorten(facts["error"])
    return facts


def _describe_end(done: subprocess.CompletedProcess[str]) -> str:
    if done.returncode < 0:
        return f"the process that imported it was ended by {signal.Signals(-done.returncode).name}"
    last = done.stderr.strip().splitlines()[-1:]
    return f"the process that imported it ended with {done.returncode}: {' '.join(last)}"


def _shorten(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= LONGEST else f"{words[:LONGEST]} ..."
