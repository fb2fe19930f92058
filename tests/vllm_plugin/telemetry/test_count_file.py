"""Counts where there is no room for them: on a real disk without a free block, and in a folder that is removed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.mmap_dict import MmapedDict

from dbo_runtime.decline import Decline
from dbo_runtime.vllm_plugin.telemetry import count_file
from dbo_runtime.vllm_plugin.telemetry.count_file import INITIAL_BYTES, CountFile
from dbo_runtime.vllm_plugin.telemetry.metrics import CHECKED_STEPS, Metrics
from tests.support.reliability.small_disk import can_mount, wrap_command

needs_disks = pytest.mark.skipif(not can_mount(), reason="needs root, or user namespaces")

# Counts on a full disk, then with room.
COUNT = """
import sys
from pathlib import Path
from dbo_runtime.decline import Decline
from dbo_runtime.vllm_plugin.telemetry import count_file
from dbo_runtime.vllm_plugin.telemetry.metrics import Metrics
from tests.vllm_plugin.telemetry.test_count_file import read_total

count_file.RETRY_SECONDS = 0.0
folder = Path(sys.argv[1])
metrics = Metrics(folder, "tiny", 0)
for number in range(200):
    metrics.count_step(Decline(f"a reason that takes room {number % 50}"))
print(read_total(folder, "declines"))
(folder / "filler").unlink()
metrics.count_step(Decline("there is room"))
metrics.count_planning(0.5)
print(read_total(folder, "declines"), sorted(path.suffix for path in folder.iterdir()))
"""
COUNT_WITHOUT_FOLDER = "from dbo_runtime.vllm_plugin.telemetry.metrics import open_folder; open_folder(); print('on')"


def read_total(folder: Path, name: str) -> float:
    values = (MmapedDict.read_all_values_from_file(str(path)) for path in folder.glob("*.db"))
    return sum(value for each in values for key, value, _, _ in each if f"dbo_{name}_total" in key)


def run_python(code: str, *arguments: str, disk: Path | None = None, **more: Any) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-c", code, *arguments]
    root = Path(__file__).parents[3]
    words = words if disk is None else wrap_command(words, disk, kibibytes=512)
    done = subprocess.run(words, cwd=root, capture_output=True, text=True, timeout=120, **more)
    assert done.returncode == 0, f"{done.returncode}: {done.stderr}"
    return done


@needs_disks
def test_a_full_disk_is_told_of_once_and_what_was_counted_reaches_it_when_there_is_room(tmp_path: Path) -> None:
    done = run_python(COUNT, str(tmp_path), disk=tmp_path)
    assert done.stdout.splitlines() == ["0", "201.0 ['.db', '.db']"]
    (line,) = [line for line in done.stderr.splitlines() if "[dbo_runtime]" in line]
    assert "counts of steps do not reach /metrics" in line
    assert f"path={tmp_path}  errno=ENOSPC  reason=No space left on device  remedy=make room" in line


def test_where_no_folder_can_be_made_nothing_is_counted_and_the_log_says_so() -> None:
    """As it is where the temporary folder is full: no folder can be made in /proc/self."""
    code = f"import tempfile; tempfile.tempdir = '/proc/self'; {COUNT_WITHOUT_FOLDER}"
    done = run_python(code, env={})
    assert done.stdout == "on\n"
    assert "counts of steps do not reach /metrics  path=/proc/self  errno=" in done.stderr


class Lines:
    """A log that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[dict[str, Any]] = []

    def error(self, event: str, **values: Any) -> None:
        self.told.append(values)


def test_a_folder_that_is_removed_is_told_of_once(tmp_path: Path) -> None:
    log: Any = Lines()
    metrics = Metrics(tmp_path, "tiny", 0, log)
    metrics.count_step(Decline("padded batch"))
    shutil.rmtree(tmp_path)
    for _ in range(3 * CHECKED_STEPS):
        metrics.count_step(Decline("padded batch"))
    (told,) = log.told
    assert told["path"] == str(tmp_path)
    assert told["errno"] == "ENOENT"


def test_a_file_grows_with_its_keys_and_stays_readable(tmp_path: Path) -> None:
    path = tmp_path / "counter.db"
    file = CountFile(path)
    keys = [f"{number:04} " + "ä" * (number % 90) for number in range(2000)]
    for _ in range(2):
        for key in keys:
            file.add(key, 1.5)
    assert path.stat().st_size > 2 * INITIAL_BYTES
    assert path.stat().st_blocks * 512 >= path.stat().st_size  # no holes, which a full disk could not fill
    found = {key.rstrip(" "): value for key, value, _, _ in MmapedDict.read_all_values_from_file(str(path))}
    assert found == {key.rstrip(" "): 3.0 for key in keys}


def test_while_there_is_no_room_it_is_tried_now_and_then_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(count_file.time, "monotonic", lambda: now[0])
    file = CountFile(tmp_path / "gone" / "counter.db")
    with pytest.raises(FileNotFoundError):
        file.add("steps", 1)
    file.add("steps", 1)
    (tmp_path / "gone").mkdir()
    file.add("steps", 1)
    assert not file.exists()
    now[0] += count_file.RETRY_SECONDS
    file.add("steps", 1)
    ((key, value, _, _),) = MmapedDict.read_all_values_from_file(str(tmp_path / "gone" / "counter.db"))
    assert (key.rstrip(" "), value) == ("steps", 4.0)
