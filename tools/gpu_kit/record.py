"""What was found so far, as files: results.json, the ends of all logs, and a few files that parts keep.

All of it is written anew after each job. A disk that is full costs what cannot be written, and is told in one line.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from .processes import Ending

RESULTS, LOGS = "results.json", "logs.txt"
MOST_FILES = 8  # that come back from the machine
MOST_BYTES = 16 << 20  # of each of them
LOG_BYTES = 60_000  # of each log, from its end
LINE_CHARACTERS = 400
NOT_HERE = "not here: "


class Record:
    """The results of all parts, of this run and of those before it on the same machine.

    Args:
        work: the folder that stays while the machine is warm.
        out: the folder that comes back.

    Attributes:
        is_complete: whether all that was found could be written.
    """

    def __init__(self, work: Path, out: Path) -> None:
        self._work = work
        self._out = out
        self.is_complete = True
        self._lock = threading.Lock()
        self._content: dict[str, Any] = {"machine": {}, "parts": {}}
        for folder in (out, *(work / name for name in ("jobs", "logs", "keep"))):
            folder.mkdir(parents=True, exist_ok=True)
        path = work / RESULTS
        if path.is_file():
            try:
                self._content |= json.loads(path.read_text())
            except ValueError:
                tell(f"{path} is damaged, and begins anew")

    @property
    def parts(self) -> dict[str, Any]:
        """The results by part."""
        parts: dict[str, Any] = self._content["parts"]
        return parts

    @property
    def keep(self) -> Path:
        """The folder in which parts leave files that are to come back."""
        return self._work / "keep"

    def get_paths(self, part: str, job: str) -> tuple[Path, Path]:
        """Return where a job writes its result, and its log."""
        name = f"{part}.{job}".replace(" ", "-").replace("/", "-")
        return self._work / "jobs" / f"{name}.json", self._work / "logs" / name

    def note_machine(self, machine: Mapping[str, Any]) -> None:
        """Remember what the machine is."""
        with self._lock:
            self._content["machine"] = dict(machine)
        self.write()

    def note_job(self, part: str, job: str, outcome: Mapping[str, Any]) -> None:
        """Remember how a job of a part ended, and what it found; what is known of its other jobs stays."""
        with self._lock:
            self.parts[part] = add_job(self.parts.get(part, {}), part, job, outcome)
        self.write()

    def note_seconds(self, part: str, seconds: float, source: str) -> None:
        """Remember how long a part took, and of which sources it was run."""
        at = datetime.now(timezone.utc).isoformat(timespec="seconds")
        with self._lock:
            self.parts[part] |= {"seconds": round(seconds, 1), "at": at, "source": source}
        self.write()

    def write(self) -> None:
        """Write everything, as far as there is room."""
        with self._lock:
            text = json.dumps(self._content, indent=1)
            logs = self._out / LOGS
            for path in (self._work / RESULTS, self._out / RESULTS):
                self._attempt(path, partial(replace_text, path, text))
            self._attempt(logs, lambda: replace_text(logs, gather_logs(self._work / "logs")))
            kept = list_kept(self.keep)
            for path in self.keep.iterdir():
                if path not in kept:
                    (self._out / path.name).unlink(missing_ok=True)
            for path in kept:
                self._attempt(path, partial(copy_file, path, self._out / path.name))

    def _attempt(self, path: Path, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as error:
            if self.is_complete:
                tell(f"cannot write {path.name}: {error.strerror or error}")
            self.is_complete = False


def add_job(found: Mapping[str, Any], part: str, job: str, outcome: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is known of a part with the outcome of one job. A job with the part's name is all of it."""
    ending = {name: value for name, value in outcome.items() if name != "results"}
    jobs = {**found.get("jobs", {}), job: ending}
    results = outcome["results"] if job == part else {**found.get("results", {}), job: outcome["results"]}
    bad = {name: each["failed"] for name, each in jobs.items() if each["failed"]}
    failed = "; ".join(text if name == part else f"{name}: {text}" for name, text in bad.items()) or None
    status = next((each["exit"] for each in jobs.values() if each["exit"] != 0), 0)
    return {**found, "exit": status, "failed": failed, "results": results, "jobs": jobs}


def read_outcome(ending: Ending, result: Path, log: Path) -> dict[str, Any]:
    """Return how a job ended and what it has written: where it failed without a word, the last line of its log."""
    results, failed = {}, ending.reason
    try:
        content = json.loads(result.read_text())
        results, failed = content["results"], failed or content["failed"]
    except (OSError, ValueError, KeyError):
        failed = failed or (None if ending.exit else "it wrote no result")
    if ending.exit and not failed:
        failed = read_last_line(log) or f"exit status {ending.exit}"
    elif ending.reason and (last := read_last_line(log)):
        failed = f"{ending.reason}; its last line: {last}"
    status = ending.exit if ending.exit != 0 or not failed else 1
    return {"seconds": round(ending.seconds, 1), "exit": status, "failed": shorten(failed), "results": results}


def read_last_line(log: Path) -> str:
    """Return the last line of a log that says something; empty if there is none."""
    try:
        lines = log.read_bytes()[-LOG_BYTES:].decode(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def shorten(text: str | None) -> str | None:
    """Return a text as one line that is not long."""
    return None if text is None else " ".join(text.split())[:LINE_CHARACTERS]


def gather_logs(folder: Path) -> str:
    """Return the ends of all logs, those of the last ones whole, in a size that comes back."""
    logs = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime)
    each = min(LOG_BYTES, (MOST_BYTES // 2) // max(1, len(logs)))
    return "".join(f"== {log.name}\n{log.read_bytes()[-each:].decode(errors='replace')}\n" for log in logs)


def list_kept(folder: Path) -> list[Path]:
    """Return the files that come back besides results and logs: the newest, and none that is too large."""
    files = [path for path in folder.iterdir() if path.is_file() and path.stat().st_size < MOST_BYTES]
    return sorted(files, key=lambda path: path.stat().st_mtime)[-(MOST_FILES - 2) :]


def replace_text(path: Path, text: str) -> None:
    """Write a temporary file, then move it into place: a full disk leaves the old one."""
    temporary = path.with_name(f".{path.name}")
    try:
        temporary.write_text(text)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def copy_file(path: Path, to: Path) -> None:
    """Copy a file, unless it is there; nothing is left of a copy that fails."""
    if to.is_file() and to.stat().st_size == path.stat().st_size and to.stat().st_mtime >= path.stat().st_mtime:
        return
    try:
        shutil.copyfile(path, to)
    except OSError:
        to.unlink(missing_ok=True)
        raise


def tell(text: str) -> None:
    """Say one line to who runs the kit."""
    print(f"gpu_kit: {text}", file=sys.stderr, flush=True)
