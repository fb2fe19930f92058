"""The runner of the kit, on parts that hang, fork or are killed: what was found is kept, and the rest runs."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tools.gpu_kit import runner as program
from tools.gpu_kit.plan import DEVICES, PARTS, Job, Part, PlanError, choose_parts
from tools.gpu_kit.processes import run_process
from tools.gpu_kit.record import LOGS, MOST_BYTES, MOST_FILES, RESULTS, Record
from tools.gpu_kit.runner import Runner, main

FAKE = Path(__file__).parents[1] / "support" / "gpu_kit" / "fake_part.py"
ROOT = Path(__file__).parents[2]
LIMIT = 30.0


def make_part(name: str, *words: str, limit: float = LIMIT, is_timed: bool = True) -> Part:
    """Return a part of one job."""
    return Part(name, ((Job(name, limit, words),),), is_timed=is_timed)


def call_fake(job: Job, result: Path, device: str) -> list[str]:
    return [sys.executable, str(FAKE), str(result), device, *job.words]


class Kit:
    """A folder that stays, one that comes back, and calls of the kit on them."""

    def __init__(self, folder: Path) -> None:
        self.work, self.out = folder / "work", folder / "out"

    def run(self, *parts: Part, seconds: float = 600.0, at_once: int = 4, device: str = "cuda") -> bool:
        record = Record(self.work, self.out)
        runner = Runner(record, device, seconds, time.time(), at_once, "abc", make_words=call_fake)
        return runner.run(parts) and record.is_complete

    @property
    def parts(self) -> dict[str, Any]:
        """What has come back."""
        parts: dict[str, Any] = json.loads((self.out / RESULTS).read_text())["parts"]
        return parts


@pytest.fixture
def kit(tmp_path: Path) -> Kit:
    return Kit(tmp_path)


def is_alive(pid: int) -> bool:
    try:
        return (
            f"{pid} (" in Path(f"/proc/{pid}/stat").read_text() and " Z " not in Path(f"/proc/{pid}/stat").read_text()
        )
    except OSError:
        return False


def test_results_are_kept_by_part_with_how_it_ended(kit: Kit) -> None:
    assert kit.run(make_part("one", "well", "a"), make_part("other", "well", "b"))
    assert list(kit.parts) == ["one", "other"]
    one = kit.parts["one"]
    assert (one["exit"], one["failed"], one["source"]) == (0, None, "abc")
    assert one["results"]["words"] == ["a"]
    assert 0 <= one["seconds"] < LIMIT


@pytest.mark.slow
def test_a_part_that_hangs_is_killed_with_all_that_it_started_and_the_rest_goes_on(kit: Kit, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    assert not kit.run(make_part("hangs", "fork and hang", str(pids), limit=5.0), make_part("next", "well"), seconds=90)
    assert kit.parts["hangs"]["failed"].startswith("killed at its limit of 5 s")
    assert kit.parts["hangs"]["results"]["what"] == "fork and hang"
    children = [int(line) for line in pids.read_text().split()]
    assert len(children) == 2
    assert not [pid for pid in children if is_alive(pid)]
    assert kit.parts["next"]["failed"] is None


def test_a_part_that_the_kernel_kills_has_reported_what_it_knew(kit: Kit) -> None:
    assert not kit.run(make_part("killed", "killed"), make_part("next", "well"))
    assert kit.parts["killed"]["failed"] == "ended by signal 9 (SIGKILL), perhaps for lack of memory"
    assert kit.parts["killed"]["results"]["what"] == "killed"
    assert kit.parts["next"]["exit"] == 0


def test_a_part_that_fails_without_a_result_is_told_by_the_last_line_of_its_log(
    kit: Kit, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not kit.run(make_part("driver", "wordless"))
    assert kit.parts["driver"]["failed"] == "ImportError: libcuda.so.1: the driver is too old"
    assert kit.parts["driver"]["exit"] == 1
    assert "driver/driver: ImportError: libcuda.so.1: the driver is too old" in capsys.readouterr().err
    assert "the driver is too old" in (kit.out / LOGS).read_text()


def test_a_command_that_there_is_not_is_an_ending_too(tmp_path: Path) -> None:
    ending = run_process([str(tmp_path / "none")], {}, tmp_path / "log", LIMIT)
    assert ending.exit is None
    assert ending.reason is not None
    assert ending.reason.startswith("cannot be started")


def test_a_second_call_updates_what_it_runs_and_keeps_the_others(kit: Kit) -> None:
    assert not kit.run(make_part("one", "failed"), make_part("other", "well", "old"))
    before = kit.parts
    assert before["one"]["failed"] == "the sum is wrong"
    for path in kit.out.iterdir():
        path.unlink()  # what comes back is an empty folder again
    assert kit.run(make_part("one", "well", "new"))
    assert kit.parts["one"]["results"]["words"] == ["new"]
    assert kit.parts["one"]["failed"] is None
    assert kit.parts["other"] == before["other"]


def test_a_second_call_may_run_one_job_of_a_part(kit: Kit) -> None:
    jobs = tuple(Job(name, LIMIT, ("failed" if name == "b" else "well", name)) for name in ("a", "b"))
    part = Part("equal", (jobs,))
    assert not kit.run(part)
    assert kit.parts["equal"]["failed"] == "b: the sum is wrong"
    assert kit.parts["equal"]["exit"] == 1
    before = kit.parts["equal"]["results"]["a"]
    (chosen,) = choose_parts(["equal/b"], [Part("equal", ((jobs[0], Job("b", LIMIT, ("well", "again"))),))])
    assert kit.run(chosen)
    assert kit.parts["equal"]["failed"] is None
    assert kit.parts["equal"]["results"]["a"] == before
    assert kit.parts["equal"]["results"]["b"]["words"] == ["again"]


def test_without_time_left_a_part_is_not_begun_and_what_was_found_before_stays(kit: Kit) -> None:
    assert kit.run(make_part("one", "well"))
    before = kit.parts["one"]["results"]
    assert not kit.run(make_part("one", "well"), make_part("other", "well"), seconds=5)
    assert kit.parts["one"]["results"] == before
    assert kit.parts["one"]["failed"] is None
    assert kit.parts["other"]["failed"] == "no time left"
    assert kit.parts["other"]["exit"] is None


@pytest.mark.slow
def test_a_limit_is_never_more_than_the_time_that_is_left(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "LEAST_SECONDS", 1.0)
    start = time.monotonic()
    assert not kit.run(make_part("hangs", "sleep", "300", limit=300), seconds=6.5)
    assert time.monotonic() - start < 40
    assert "killed at its limit" in kit.parts["hangs"]["failed"]


def test_a_wave_is_left_out_if_what_it_builds_on_failed(kit: Kit) -> None:
    waves = ((Job("pair", LIMIT, ("failed",)),), (Job("engine", LIMIT, ("well",)),))
    assert not kit.run(Part("two-ranks", waves))
    jobs = kit.parts["two-ranks"]["jobs"]
    assert jobs["engine"]["failed"] == "left out, because what it builds on failed"
    assert jobs["pair"]["failed"] == "the sum is wrong"


def test_waves_that_do_not_build_on_each_other_all_run(kit: Kit) -> None:
    waves = ((Job("wide", LIMIT, ("failed",)),), (Job("deep", LIMIT, ("well",)),))
    assert not kit.run(Part("link", waves, builds_up=False))
    assert kit.parts["link"]["jobs"]["deep"]["failed"] is None


def test_parts_that_measure_no_times_run_side_by_side(kit: Kit, tmp_path: Path) -> None:
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    assert kit.run(make_part("a", "meet", a, b, is_timed=False), make_part("b", "meet", b, a, is_timed=False))


@pytest.mark.slow
def test_parts_that_measure_times_run_alone(kit: Kit) -> None:
    parts = [make_part("a", "sleep", "0.2", is_timed=False), *(make_part(name, "sleep", "0.2") for name in "bc")]
    assert kit.run(*parts)
    spans = [(part["results"]["at"], part["results"]["ended"]) for part in kit.parts.values()]
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))


@pytest.mark.slow
def test_no_more_processes_run_at_once_than_there_is_room_for(kit: Kit) -> None:
    part = Part("equal", (tuple(Job(name, LIMIT, ("sleep", "0.3")) for name in "abc"),))
    assert kit.run(part, at_once=1)
    spans = sorted((found["at"], found["ended"]) for found in kit.parts["equal"]["results"].values())
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))


def test_what_has_no_meaning_on_a_device_says_so(kit: Kit) -> None:
    part = Part("frees", ((Job("frees", LIMIT, ("failed",), absent={"cpu": "it needs CUDA"}),),))
    assert kit.run(part, device="cpu")
    assert kit.parts["frees"]["results"] == "not here: it needs CUDA"
    assert kit.parts["frees"]["exit"] == 0


def test_at_most_eight_files_come_back_and_none_is_large(kit: Kit) -> None:
    assert kit.run(make_part("many", "keep", "12", "10"))
    names = {path.name for path in kit.out.iterdir()}
    assert len(names) == MOST_FILES
    assert {RESULTS, LOGS, "11.bin", "6.bin"} <= names
    assert kit.run(make_part("large", "keep", "1", str(MOST_BYTES)))
    assert "0.bin" not in {path.name for path in kit.out.iterdir()}
    assert len(list(kit.out.iterdir())) <= MOST_FILES


@pytest.mark.slow
def test_logs_come_back_shortened(kit: Kit) -> None:
    assert kit.run(make_part("one", "well"))
    (kit.work / "logs" / "one.one").write_bytes(b"x" * MOST_BYTES + b"the end")
    Record(kit.work, kit.out).write()
    text = (kit.out / LOGS).read_text()
    assert len(text) < MOST_BYTES
    assert text.rstrip().endswith("the end")


@pytest.mark.slow
def test_a_full_disk_is_told_in_a_line_and_what_was_written_before_stays(
    kit: Kit, capsys: pytest.CaptureFixture[str]
) -> None:
    assert kit.run(make_part("one", "well"))
    before = kit.parts
    (kit.out / f".{RESULTS}").symlink_to("/dev/full")
    record = Record(kit.work, kit.out)
    record.note_machine({"chip": "any"})
    assert not record.is_complete
    assert kit.parts == before
    assert "gpu_kit: cannot write results.json: No space left on device" in capsys.readouterr().err
    assert json.loads((kit.work / RESULTS).read_text())["machine"] == {"chip": "any"}


@pytest.mark.slow
def test_results_that_are_damaged_begin_anew(kit: Kit) -> None:
    kit.work.mkdir(parents=True)
    (kit.work / RESULTS).write_text("{")
    assert kit.run(make_part("one", "well"))
    assert list(kit.parts) == ["one"]


def set_when_there(event: threading.Event, path: Path) -> None:
    while not path.exists():
        time.sleep(0.05)
    event.set()


def test_a_run_that_is_ended_from_outside_keeps_what_it_has(kit: Kit) -> None:
    record = Record(kit.work, kit.out)
    runner = Runner(record, "cuda", 600, time.time(), 4, make_words=call_fake)
    result, _ = record.get_paths("hangs", "hangs")
    ender = threading.Thread(target=set_when_there, args=(runner.stop, result))
    ender.start()
    assert not runner.run([make_part("hangs", "sleep", "300", limit=300), make_part("next", "well")])
    ender.join()
    assert kit.parts["hangs"]["failed"].startswith("killed, because the run was ended")
    assert kit.parts["next"]["failed"] == "the run was ended"


@pytest.fixture
def on_kit(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> Kit:
    """Let the program use the folders of the test."""
    monkeypatch.setenv("KIT_WORK", str(kit.work))
    monkeypatch.setenv("OUT", str(kit.out))
    return kit


def answer_with(monkeypatch: pytest.MonkeyPatch, problem: str | None) -> None:
    found = {"chip": None, "source": "abc", "problem": problem}
    monkeypatch.setattr(program, "find_machine", lambda device: found)


def test_without_a_gpu_nothing_is_begun_and_a_line_says_why(
    on_kit: Kit, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    problem = "no device can be used: RuntimeError: Found no NVIDIA driver on your system"
    answer_with(monkeypatch, problem)
    assert main(["smoke"]) == 2
    assert capsys.readouterr().err.splitlines() == [f"gpu_kit: {problem}"]
    assert json.loads((on_kit.out / RESULTS).read_text())["machine"]["problem"] == problem
    assert on_kit.parts == {}


@pytest.mark.parametrize("words", ["nothing", "equal/nothing"])
def test_a_part_that_there_is_not_is_told_with_those_that_there_are(
    words: str, on_kit: Kit, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([words]) == 2
    assert "smoke" in capsys.readouterr().err or "llama" in words or "equal" in words


def test_parts_run_in_order_of_importance_however_they_are_named() -> None:
    assert [part.name for part in choose_parts(["link", "smoke"], PARTS)] == ["smoke", "link"]
    chosen = choose_parts(["equal/llama", "equal/mla"], PARTS)
    assert [job.name for part in chosen for job in part.jobs] == ["llama", "mla"]
    with pytest.raises(PlanError, match="llama-exact"):
        choose_parts(["equal/none"], PARTS)


def test_each_job_has_a_program_a_limit_and_a_name_of_its_own() -> None:
    jobs = [(part.name, job) for part in PARTS for job in part.jobs]
    assert len({(part, job.name) for part, job in jobs}) == len(jobs)
    for _, job in jobs:
        assert importlib.util.find_spec(f"tools.gpu_kit.parts.{job.words[0]}") is not None
        assert 0 < job.limit <= 180
        assert job.absent.keys() <= set(DEVICES) - {"cuda"}, "all of it runs on a GPU"


def test_the_runner_needs_the_standard_library_only() -> None:
    call = [
        sys.executable,
        "-I",
        "-S",
        "-c",
        f"import sys; sys.path[:0] = [{str(ROOT)!r}]; import tools.gpu_kit.runner",
    ]
    done = subprocess.run(call, env={"PATH": os.environ["PATH"]}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
