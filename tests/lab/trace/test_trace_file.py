from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dbo_runtime.errors import ConfigError
from dbo_runtime.lab.trace import trace_command
from dbo_runtime.lab.trace.trace_command import describe_ranges
from dbo_runtime.lab.trace.trace_file import read_trace
from dbo_runtime.observe.timeline import Span, Timeline
from dbo_runtime.observe.trace import save_trace
from tests.support.observe import overlap_script
from tests.support.observe.recorded_runs import TOY, record_run

RANKS = {"rank 0": record_run(), "rank 1": record_run(3)}
PNG = b"\x89PNG\r\n\x1a\n"


def run_command(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    parser = argparse.ArgumentParser()
    trace_command.add_arguments(parser)
    assert trace_command.run(parser.parse_args([str(word) for word in words])) == 0
    return capsys.readouterr().out


def test_a_trace_comes_back_as_it_was_to_the_nanosecond(tmp_path: Path) -> None:
    save_trace(RANKS, tmp_path / "step.json")
    found = read_trace(tmp_path / "step.json")
    assert list(found) == list(RANKS)
    origin = min(min(span.issued or 0, span.start) for line in RANKS.values() for span in line.spans)
    for name, timeline in RANKS.items():
        assert found[name].bound == timeline.bound
        for span, was in zip(found[name].spans, timeline.spans, strict=True):
            assert (span[:3], span.waits) == (was[:3], was.waits)
            times = (was.start, was.end, was.issued)
            assert (span.start, span.end, span.issued) == pytest.approx([t - origin for t in times], abs=1.1e-9)


def test_the_command_prints_what_a_script_of_its_own_finds_in_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "step.json"
    save_trace(RANKS, path)
    script = subprocess.run([sys.executable, overlap_script.__file__, path], capture_output=True, text=True, check=True)
    independent = json.loads(script.stdout)
    printed = run_command(capsys, path)
    figures = json.loads(run_command(capsys, path, "--json"))["step.json"]
    for name in RANKS:
        assert figures[name]["overlap"] == pytest.approx(independent[name]["overlap"], abs=1e-9)
        assert figures[name]["hidden"] == pytest.approx(independent[name]["hidden"], abs=1e-9)
        assert f"{name}: " in printed
        assert f"E_overlap {independent[name]['overlap']:.1%}" in printed


def test_a_folder_of_traces_becomes_a_table_with_medians(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step, line in enumerate((0.5, 2.0, 1.0)):
        spans = (Span("compute", "a", 0, 0.0, line, 0.0), Span("comm", "b", 0, line, 2 * line, 0.0, (("a", 0),)))
        save_trace({"rank 0": Timeline(spans, bound=line)}, tmp_path / f"step-{step}.json")
    head, *rows, medians = run_command(capsys, tmp_path).splitlines()
    assert head.split()[:6] == ["step", "rank", "ms", "hidden", "E_overlap", "LB/T"]
    assert [row.split()[:6] for row in rows] == [
        ["step-0.json", "rank", "0", "1000.00", "0.0%", "0.0%"],
        ["step-1.json", "rank", "0", "4000.00", "0.0%", "0.0%"],
        ["step-2.json", "rank", "0", "2000.00", "0.0%", "0.0%"],
    ]
    assert rows[1].endswith("0.500  compute: nothing left 2000.00 ms")
    assert medians.split() == ["median", "2000.00", "0.0%", "0.0%", "0.500"]


def test_planning_is_summed_up_over_the_steps_where_it_is_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step, planning in enumerate((0.0005, None, 0.25, 0.001)):
        save_trace({"rank 0": replace(TOY, planning=planning)}, tmp_path / f"step-{step}.json")
    *_, medians, last = run_command(capsys, tmp_path).splitlines()
    assert medians.split()[0] == "median"
    assert last == "planning before a step: median 1.000, maximum 250.000 ms"
    figures = json.loads(run_command(capsys, tmp_path, "--json"))
    assert [figures[f"step-{step}.json"]["rank 0"]["planning"] for step in range(4)] == [0.0005, None, 0.25, 0.001]
    assert "planning took 250.000 ms" in run_command(capsys, tmp_path / "step-2.json")


def test_a_trace_from_before_planning_was_recorded_is_read(tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    save_trace({"rank 0": replace(TOY, bound=1.5, planning=0.25)}, path)
    assert [(line.bound, line.planning) for line in read_trace(path).values()] == [(1.5, 0.25)]
    trace = json.loads(path.read_text())
    del trace["otherData"]["planning_seconds"]
    path.write_text(json.dumps(trace))
    assert [(line.bound, line.planning) for line in read_trace(path).values()] == [(1.5, None)]


def test_a_figure_has_a_panel_for_each_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path, figure = tmp_path / "step.json", tmp_path / "step.png"
    save_trace(RANKS, path)
    run_command(capsys, path, "--figure", figure)
    assert figure.read_bytes().startswith(PNG)


def test_a_figure_of_several_traces_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in range(2):
        save_trace({"rank 0": TOY}, tmp_path / f"step-{step}.json")
    with pytest.raises(ConfigError, match="name one of its files"):
        run_command(capsys, tmp_path, "--figure", tmp_path / "step.png")


def test_a_folder_without_traces_is_said_to_be_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=r"has no traces.*No step was split"):
        run_command(capsys, tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"{}",
        b'{"traceEvents": 3, "otherData": {"bound_seconds": {}}}',
        b'{"traceEvents": [{"ph": "X", "name": "op"}], "otherData": {"bound_seconds": {}}}',
        b'{"traceEvents": [], "otherData": {"bound_seconds": {"rank 0": -1}}}',
        b'{"traceEvents": [], "otherData": {"bound_seconds": {}, "planning_seconds": [1]}}',
        b'{"traceEvents": [], "otherData": {"bound_seconds": {}, "planning_seconds": {"rank 0": "1"}}}',
        b'{"traceEvents": [], "otherData": {"bound_seconds": {}, "planning_seconds": {"rank 0": NaN}}}',
        b'{"traceEvents": [{"ph": "X", "name": "aten::mm", "ts": 1, "dur": 2, "pid": 7}]}',  # of another profiler
    ],
)
def test_what_is_no_trace_of_ours_is_named(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"other\.json.*is not a trace of dbo_runtime"):
        read_trace(path)


@pytest.mark.parametrize(("content", "why"), [(None, "No such file"), (b"\xff\xfe\x00", "it is not text")])
def test_what_cannot_be_read_is_named_with_the_reason(content: Any, why: str, tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"step\.json.*cannot be read: {why}"):
        read_trace(path)


def test_a_step_of_a_folder_is_chosen_by_the_number_in_its_files_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in (1, 3, 30):
        save_trace(RANKS, tmp_path / f"step-{number:06}.json")
    for number in ("3", "000003"):
        figures = json.loads(run_command(capsys, tmp_path, "--step", number, "--json"))
        assert list(figures) == ["step-000003.json"]
    assert json.loads(run_command(capsys, tmp_path / "step-000030.json", "--step", "30", "--json"))
    with pytest.raises(ConfigError, match=r"has no step '2'; there are 1, 3, 30\."):
        run_command(capsys, tmp_path, "--step", "2")


@pytest.mark.parametrize(
    ("numbers", "text"), [([4], "4"), ([1, 2, 3], "1 to 3"), ([1, 3, 4, 9], "1, 3 to 4, 9"), ([0, 2], "0, 2")]
)
def test_the_steps_that_are_there_are_named_without_gaps(numbers: list[int], text: str) -> None:
    assert describe_ranges(numbers) == text
