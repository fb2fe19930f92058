"""Commands that build and check packages."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path


class DistError(Exception):
    """The packages are not fit to be published; the message is one line that says why."""


def run(command: Sequence[str], folder: Path | None = None) -> str:
    """Run a command without the checkout on Python's path, and return what it prints.

    Raises:
        DistError: if it fails.
    """
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)
    if done.returncode:
        raise DistError(f"`{' '.join(command)}` failed:\n{done.stdout[-1000:]}{done.stderr[-2000:]}")
    return done.stdout


def ask_git(root: Path, *words: str) -> str:
    """Return what git prints for a checkout, without the last line's end."""
    return run(["git", "-C", str(root), *words]).rstrip("\n")
