"""An interrupt ends processes that ignore it, and what they have started, but not the one that cleans up after them."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dbo_runtime.lab.start.interrupt import KEPT, end_children_on_interrupt

DEAF = """
import signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
if len(sys.argv) > 1:
    subprocess.Popen([sys.executable, __file__])
open(sys.argv[1] if len(sys.argv) > 1 else "inner", "w").close()
time.sleep(600)
"""


def test_processes_that_ignore_an_interrupt_are_ended_before_it_is_raised(tmp_path: Path) -> None:
    (tmp_path / "deaf.py").write_text(DEAF)
    deaf = subprocess.Popen([sys.executable, "deaf.py", "outer"], cwd=tmp_path)
    kept = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()", KEPT], stdin=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while not ((tmp_path / "outer").exists() and (tmp_path / "inner").exists()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), end_children_on_interrupt():
        signal.raise_signal(signal.SIGINT)
    assert deaf.wait(10) == -signal.SIGKILL
    assert kept.poll() is None
    kept.communicate(timeout=10)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_library_that_loses_the_interrupt_cannot_keep_the_program(tmp_path: Path) -> None:
    code = """
import signal, time
from dbo_runtime.lab.start import interrupt
interrupt.GRACE_SECONDS = 0.5
with interrupt.end_children_on_interrupt():
    while True:
        try:
            signal.raise_signal(signal.SIGINT)
            time.sleep(60)
        except KeyboardInterrupt:
            pass
"""
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (130, "interrupted while vLLM was starting.\n")
