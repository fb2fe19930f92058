"""Try every text architecture of vLLM's registry: `make try-registry` writes docs/models.md.

python -m tests.registry.coverage --write-page --only GraniteForCausalLM
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from tests.registry.outcome import Outcome, judge, make_lines
from tests.registry.tiny_configs import list_trials
from tests.registry.trial import SETTINGS, serve
from tests.support.kept import keep
from tests.support.page import ROOT, tell_section
from tests.support.vllm.forking import PRELOADED

PAGE = ROOT / "docs" / "models.md"
LIMIT = 240.0  # seconds of a trial
POLL = 0.2


def main() -> None:
    """Try the architectures, print the table, and write it if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="ARCHITECTURE", help="those; the others keep their last results")
    parser.add_argument("--write-page", action="store_true", help="write the table to docs/models.md")
    arguments = parser.parse_args()
    for module in PRELOADED:  # trials are forked, and import nothing
        importlib.import_module(module)
    found: dict[str, Any] = {}
    for architecture in arguments.only or list_trials():
        outcome = try_architecture(architecture)
        print(f"{architecture}: {outcome.what}: {outcome.why}", flush=True)
        found[architecture] = outcome._asdict()
        if arguments.write_page:  # what was tried is kept if the rest is not
            found = keep("registry", found)
    outcomes = {name: Outcome(**found[name]) for name in list_trials() if name in found}
    tell_section(arguments.write_page, "registry", "make try-registry", make_lines(outcomes), PAGE)


def try_architecture(architecture: str) -> Outcome:
    """Serve a tiny model of an architecture in each way that its outcome depends on."""
    tried: dict[str, dict[str, Any]] = {}
    for side in SETTINGS:
        if side == "no adapter" and tried["overlap"].get("adapter") is not None:
            continue  # it is used in any case
        if side == "vLLM alone" and not any("error" in trial for trial in tried.values()):
            continue  # vLLM by itself is asked only about what failed
        trial = run_forked(partial(serve, architecture, side))
        tried[side] = {**trial, "adapter": find_adapter(trial["log"])}
    return judge(tried)


def find_adapter(log: str) -> str | None:
    """Return the registered adapter by which steps were split, as the log says; None without one."""
    found = re.search(r"dual-batch overlap is active .*? adapter=(\S+)", log)
    return None if found is None or found[1].endswith(".GenericAdapter") else found[1]


def run_forked(job: Callable[[], dict[str, Any]], limit: float = LIMIT) -> dict[str, Any]:
    """Return what a job returns in a forked process, or its `error`; in any case with its `log`.

    All processes that it has started are ended.
    """
    with tempfile.TemporaryDirectory() as folder:
        log, result = Path(folder, "log"), Path(folder, "result")
        process = os.fork()
        if process == 0:
            _work(job, log, result)
        deadline = time.monotonic() + limit
        while not os.waitpid(process, os.WNOHANG)[0]:
            if time.monotonic() > deadline:
                os.killpg(process, signal.SIGKILL)
                os.waitpid(process, 0)
                break
            time.sleep(POLL)
        with suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)  # workers whose engine has failed
        found: dict[str, Any] = {"error": "it died, or has not answered in time"}
        if result.is_file():
            found = json.loads(result.read_text())
        return {**found, "log": log.read_text(errors="replace")}


def _work(job: Callable[[], dict[str, Any]], log: Path, result: Path) -> None:
    """Do a job, write what it returns, and exit without vLLM's own end, which waits for processes."""
    os.setsid()
    with log.open("w") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    try:
        found = job()
    except BaseException as error:  # noqa: BLE001 - it is the trial's outcome, whatever it is
        traceback.print_exc()
        found = {"error": f"{type(error).__name__}: {error}"}
    part = result.with_suffix(".part")
    part.write_text(json.dumps(found))
    part.rename(result)
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
