"""Progress is shown on a terminal only, and gone when the work is done."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

import dbo_runtime
from dbo_runtime.lab import progress

ROOT = Path(dbo_runtime.__file__).parents[1]
CODE = """
import time
from dbo_runtime.lab.progress import find_terminal, show_progress
print(find_terminal(), [time.sleep(0.2) or item for item in show_progress((1, 2, 3), "counting", "thing")])
"""


def start(stderr: int) -> subprocess.Popen[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TQDM_")}
    env = {**kept, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    return subprocess.Popen([sys.executable, "-c", CODE], env=env, stdout=subprocess.PIPE, stderr=stderr, text=True)


def test_a_terminal_gets_a_bar_that_goes_away() -> None:
    pytest.importorskip("tqdm")
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))  # a new one has no size at all
    name = os.ttyname(theirs)
    process = start(theirs)
    assert process.communicate(timeout=60)[0] == f"{name} [1, 2, 3]\n"
    os.close(theirs)
    shown = os.read(ours, 1 << 16).decode()  # an error, if there is nothing
    os.close(ours)
    assert "counting" in shown
    assert "thing" in shown
    assert shown.endswith("\r")


def test_what_is_no_terminal_gets_nothing() -> None:
    process = start(subprocess.PIPE)
    assert process.communicate(timeout=60) == (" [1, 2, 3]\n", "")


def test_without_tqdm_nothing_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "find_spec", lambda name: None)
    items = (1, 2, 3)
    assert progress.show_progress(items, "counting", "thing") is items
