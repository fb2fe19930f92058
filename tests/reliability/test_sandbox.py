"""A sandbox sees all of its processes, whatever they have become, and ends them."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.reliability.sandbox import Sandbox

pytestmark = [
    pytest.mark.slow,
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for a /dev/shm of its own"),
]
# What vLLM's processes do: the title takes the place of the environment, and the parent ends.
TITLED = "import setproctitle, time; setproctitle.setproctitle('X' * 3000); print('here', flush=True); time.sleep(300)"


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="rel-") as name:
        yield Path(name)


def start(sandbox: Sandbox, *words: str) -> int:
    """Start a process whose parent ends at once; return its id."""
    script = f'"$@" & echo $! > {sandbox.folder}/id'
    subprocess.run(sandbox.enter("sh", "-c", script, "sh", *words), check=True, stdout=subprocess.DEVNULL)
    return int((sandbox.folder / "id").read_text())


@pytest.mark.parametrize(
    "words",
    [
        ("env", "--ignore-environment", "sleep", "300"),
        ("setsid", "sleep", "300"),
        ("unshare", "--mount", "sleep", "300"),
        (sys.executable, "-c", TITLED),
    ],
    ids=["no environment", "own session", "further mounts", "other title"],
)
def test_no_process_is_lost(folder: Path, words: tuple[str, ...]) -> None:
    with Sandbox(folder) as sandbox:
        process = start(sandbox, *words)
        time.sleep(0.5)  # by when it has changed its title
        assert set(sandbox.find_processes()) == {process}
        sandbox.end_all()
        assert sandbox.find_processes() == {}
        last = start(sandbox, *words)
    assert not is_running(last)


def test_other_processes_are_none_of_its(folder: Path) -> None:
    with subprocess.Popen(["sleep", "300"]) as other, Sandbox(folder) as sandbox:
        assert sandbox.find_processes() == {}
        sandbox.end_all()
        assert other.poll() is None
        other.kill()


def is_running(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
