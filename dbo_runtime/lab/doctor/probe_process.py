"""Run the probe in its own process, so that a broken package is a finding like any other."""

from __future__ import annotations

import os
import reprlib
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from dbo_runtime.errors import ConfigError
from dbo_runtime.lab.doctor.probe import MARK
from dbo_runtime.outside_files import parse_json

TIMEOUT_SECONDS = 300.0  # a first import of vLLM from a slow disk takes minutes
MAX_ERROR_CHARACTERS = 400


def run_probe(subject: str, environ: Mapping[str, str], *arguments: str, **variables: str) -> dict[str, Any]:
    """Return the facts that `probe` prints about *subject*, or `error`: the reason why it printed none. Never raises.

    `is_silent` is there where the process has answered nothing, not even an error. Some subjects take *arguments*. The
    process sees the same packages as this one, and *environ* updated with *variables*.
    """
    path = os.pathsep.join(map(os.path.abspath, sys.path))
    env = {**environ, "PYTHONPATH": path, **variables}
    command = [sys.executable, "-m", "dbo_runtime.lab.doctor.probe", subject, *arguments]
    try:
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {TIMEOUT_SECONDS:.0f} s", "is_silent": True}
    answers = [line.removeprefix(MARK) for line in done.stdout.splitlines() if line.startswith(MARK)]
    facts = _read_facts(answers[-1]) if answers else _describe_silence(done)
    if "error" in facts:
        facts["error"] = _shorten(facts["error"])
    return facts


def _read_facts(answer: str) -> dict[str, Any]:
    try:
        facts = parse_json(answer)
    except ConfigError as error:
        return {"error": f"its answer cannot be read: {error}"}
    return facts if isinstance(facts, dict) else {"error": f"its answer is {reprlib.repr(facts)}"}


def _describe_silence(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    return {"error": _describe_end(done), "is_silent": True}


def _describe_end(done: subprocess.CompletedProcess[str]) -> str:
    if done.returncode < 0:
        names = {number.value: number.name for number in signal.Signals}
        return f"the process that imported it was ended by {names.get(-done.returncode, f'signal {-done.returncode}')}"
    last = done.stderr.strip().splitlines()[-1:]
    return f"the process that imported it ended with {done.returncode}: {' '.join(last)}"


def _shorten(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MAX_ERROR_CHARACTERS else f"{line[:MAX_ERROR_CHARACTERS]} ..."
