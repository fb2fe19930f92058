"""What a part finds: written after each finding, so that a part that is killed has reported what it knew."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..record import NOT_HERE, replace_text, shorten


class Findings:
    """Findings by name, in a file; one that fails is a finding, too.

    Attributes:
        found: all of them.
        failed: what failed, in a line each.
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self.found: dict[str, Any] = {}
        self.failed: list[str] = []
        self.path = path
        self._is_silent = False

    def note(self, name: str, value: Any) -> None:
        """Add a finding."""
        self.found[name] = value
        self._write()

    def fail(self, text: str) -> None:
        """Add what failed."""
        self.failed.append(text)
        self._write()

    def attempt(self, name: str, work: Callable[[], Any]) -> None:
        """Add what *work* returns; if it raises an error, that, and go on."""
        try:
            self.note(name, work())
        except Exception as error:  # noqa: BLE001 - whatever a device or a library raises: the rest is still to be seen
            traceback.print_exc()
            told = describe(error)
            self.found[name] = f"FAILED: {told}"
            self.fail(f"{name}: {told}")

    def be_silent(self) -> None:
        """Write nothing any more: another process of the part does."""
        self._is_silent = True

    def take_over(self, problem: str | None) -> None:
        """Read what another process of the part has written; *problem* is what went wrong with it, if anything did."""
        try:
            content = json.loads(self.path.read_text())
        except (OSError, ValueError):
            content = {"results": {}, "failed": None}
            problem = f"{problem or 'all ended'}, and no process of the part has written a result"
        self._is_silent = False
        self.found |= content["results"]
        self.failed += [text for text in (content["failed"] or problem,) if text]
        self._write()

    def _write(self) -> None:
        if self._is_silent:
            return
        content = {"results": self.found, "failed": "; ".join(self.failed) or None}
        try:
            replace_text(self.path, json.dumps(content, indent=1, default=str))
        except OSError as error:  # the disk is full: the log, and what was written before, is all that stays
            self.failed.append(f"cannot write {self.path.name}: {error.strerror}")
            print(self.failed[-1], file=sys.stderr)


def say_absent(reason: str) -> str:
    """Return what is reported where something has no meaning."""
    return f"{NOT_HERE}{reason}"


def describe(error: BaseException) -> str:
    """Return an error as one line."""
    return shorten(f"{type(error).__name__}: {error}") or type(error).__name__


def run_part(run: Callable[[Findings, str, list[str]], None], ends_at_once: bool = True) -> None:
    """Run a part as a program, and end it; at once as a rule: destructors of a device that failed may hang."""
    path, device, *words = sys.argv[1:]
    findings = Findings(Path(path))
    try:
        run(findings, device, words)
    except Exception as error:  # noqa: BLE001 - it is the result
        traceback.print_exc()
        findings.fail(describe(error))
    findings.note("complete", True)
    print(json.dumps(findings.found, indent=1, default=str)[:20_000])
    sys.stdout.flush()
    sys.stderr.flush()
    status = 1 if findings.failed else 0
    if ends_at_once:
        os._exit(status)
    sys.exit(status)
