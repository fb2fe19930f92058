"""What fuzzing found, one by one: each was an error of another kind, a hang, or went unnoticed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbo_runtime.__main__ import FAILED, main
from dbo_runtime.adapters.contract import record_program
from dbo_runtime.adapters.registry import check_adapter
from dbo_runtime.config import read_environment
from dbo_runtime.errors import ConfigError, ProgramError, ScheduleError
from dbo_runtime.ir.render import parse, render
from dbo_runtime.lab.trace.trace_file import read_trace
from dbo_runtime.observe.counts import FOLDER, SHARED, get_folder, statistics
from dbo_runtime.observe.timeline import Span, Timeline
from dbo_runtime.observe.trace import make_trace, prepare_folder
from dbo_runtime.planner.costs.program_spec import LayerRun, OpSpec, ProgramSpec
from dbo_runtime.setting_sources import reread_environment
from tests.support.observe.recorded_runs import TOY
from tests.support.programs import lower_toy


def write_trace(path: Path, **changes: Any) -> Path:
    """Write a trace whose first op is changed."""
    trace = json.loads(json.dumps(make_trace({"rank 0": TOY})))
    op = next(event for event in trace["traceEvents"] if event["ph"] == "X")
    for name, value in changes.items():
        (op["args"] if name in ("op", "micro_batch", "waits", "issued") else op)[name] = value
    path.write_text(json.dumps(trace))
    return path


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"ts": float("nan")}, r"traceEvents\[\d+\]: ts is nan"),
        ({"ts": 1e308}, "ts is 1e"),
        ({"dur": -1}, "dur is -1"),
        ({"issued": True}, "issued is True"),
        ({"micro_batch": 1.0}, "micro_batch is 1.0"),
        ({"cat": ["compute"]}, "cat is"),
        ({"op": "\x1b[31m"}, "op is"),
        ({"waits": [["nowhere", 0]]}, "rank 0 waits for nowhere/0, which the trace does not have"),
        ({"waits": [[0, "attention"]]}, "waits is .* pairs of an op and a micro-batch"),
        ({"pid": 99}, "pid is 99"),
    ],
)
def test_a_field_of_a_trace_is_named(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"step\.json' is not a trace.*{says}"):
        read_trace(write_trace(tmp_path / "step.json", **changes))


def test_a_trace_of_many_lanes_is_refused(tmp_path: Path) -> None:
    spans = tuple(Span(f"lane{number}", "op", number, 0.0, 1.0) for number in range(17))
    (tmp_path / "step.json").write_text(json.dumps(make_trace({"rank 0": Timeline(spans)})))
    with pytest.raises(ConfigError, match="rank 0 has 17 lanes"):
        read_trace(tmp_path / "step.json")


def test_names_of_a_trace_are_no_paths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "traces").mkdir()
    path = write_trace(tmp_path / "traces" / "step.json", op="../../out", cat="/out", waits=[])
    assert main(["trace", str(path)]) == 0
    assert main(["trace", str(path.parent)]) == 0
    assert sorted(file.name for file in tmp_path.rglob("*")) == ["step.json", "traces"]
    capsys.readouterr()


PIECES = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 6)), max_size=12)


@given(PIECES, PIECES)
def test_common_time_is_that_of_a_count_of_ticks(ours: list[tuple[int, int]], theirs: list[tuple[int, int]]) -> None:
    lanes = {"compute": ours, "comm": theirs}
    spans = [Span(lane, "op", 0, s, s + n) for lane, pieces in lanes.items() for s, n in pieces]
    ticks = [{tick for start, length in pieces for tick in range(start, start + length)} for pieces in lanes.values()]
    timeline = Timeline(tuple(spans))
    assert timeline.overlap("compute", "comm") == len(ticks[0] & ticks[1])
    assert timeline.measure_hidden() == (len(ticks[1]), len(ticks[0] & ticks[1]))


def test_a_step_that_takes_no_time_is_drawn() -> None:
    shortest = Timeline((Span("compute", "a", 0, 0.0, 0.0), Span("comm", "b", 1, 0.0, 5e-324)))
    assert shortest.draw(10).splitlines() == [" compute |0.........|", "    comm |1.........|"]


OP = OpSpec("op", "compute", ())


@pytest.mark.parametrize(
    ("inputs", "runs", "says"),
    [
        ((), [LayerRun(9_000, (OP,)), LayerRun(9_000, (OP,))], "18000 layers"),
        ((), [LayerRun(10_000, (OP._replace(outputs=1_000),))], "write 10010000 values"),
        (("x",), [LayerRun(10_000, (OP._replace(reads=("x",) * 100),))], "read 1000000"),
        ((), [LayerRun(1, tuple(OpSpec(f"o{n}", f"l{n}", ()) for n in range(17)))], "on 17 lanes"),
        (tuple(map(str, range(1001))), [LayerRun(1, (OP,))], "inputs are 1001"),
    ],
)
def test_a_program_that_is_too_large_is_refused_before_it_is_unrolled(
    inputs: tuple[str, ...], runs: list[LayerRun], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        ProgramSpec(inputs, tuple(runs), ())


@pytest.mark.parametrize(
    "settings",
    [{"DBO_MICRO_BATCHES": 2}, {1: "2"}, {"DBO_MICRO_BATCHES": "65"}, {"DBO_TRACE_STEPS": "9" * 5000}, {"DBO_X": None}],
)
def test_settings_of_other_types_or_sizes_are_refused(settings: dict[Any, Any]) -> None:
    for read in (read_environment, lambda changes: reread_environment({}, changes)):
        with pytest.raises(ConfigError) as raised:
            read(settings)
        assert len(str(raised.value)) < 1000


@pytest.mark.parametrize("word", ["%0/-1", "%0/x", "%-1/0", "%" + "9" * 5000 + "/0"])
def test_a_value_of_a_schedule_is_of_one_of_its_micro_batches(word: str) -> None:
    schedule = lower_toy()
    row = next(line for line in render(schedule).splitlines() if "free" in line)
    with pytest.raises(ScheduleError, match="line 1 of the schedule cannot be read"):
        parse(f"{row} {word}", schedule.programs)


def test_a_schedule_of_more_lines_than_ops_is_refused() -> None:
    schedule = lower_toy()
    with pytest.raises(ScheduleError, match="lines, but its programs only"):
        parse("\n".join([render(schedule)] * 10), schedule.programs)


@pytest.mark.parametrize(
    "words",
    [
        ["--tokens", "9" * 5000],
        ["--decodes", "4194304"],
        ["--bandwidth", "9" * 400 + "x"],
        ["--network", "9" * 5000 + ":1GB/s:1GB/s", "--tp", "2"],
        ["--costs", "x" * 5000],
    ],
)
def test_an_argument_is_refused_in_a_few_words(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--costs", "910b-share-5591", *words]) == FAILED
    assert len(capsys.readouterr().err) < 6_000


def fail(*_: Any) -> None:
    raise ValueError("no")


@pytest.mark.parametrize(
    ("record", "says"),
    [
        (fail, "cannot be called|takes the input"),
        (lambda self, p, model, collectives, x, positions: fail(), r"failed: ValueError\('no'\)"),
        (
            lambda self, p, model, collectives, x, positions: p.compute("op", fail, x, outputs=10**9),
            "outputs=1000000000",
        ),
        (lambda self, p, model, collectives, x, positions: p.compute("op", fail, x, exclusive=[]), r"exclusive=\[\]"),
        (lambda self, p, model, collectives, x, positions: p.compute("op", fail, x, overwrites=[x]), "tuple of values"),
        (lambda self, p, model, collectives, x, positions: p.layer("0").__enter__(), "a layer is '0'"),
        (lambda self, p, model, collectives, x, positions: p.output(1, x), "name of an output is 1"),
    ],
)
def test_what_an_adapter_does_wrong_is_told(record: Callable[..., Any], says: str) -> None:
    adapter: Any = type("Adapter", (), {"record": record})()
    with pytest.raises(ProgramError, match=says):
        record_program(adapter, None, None)  # type: ignore[arg-type]


def test_an_adapter_that_raises_when_it_is_looked_at_is_refused() -> None:
    class Metaclass(type):
        def __getattr__(cls, name: str) -> Any:
            raise RuntimeError(name)

    with pytest.raises(ProgramError, match=r"has no method decline\(\)"):
        check_adapter(Metaclass("Adapter", (), {}), "odd:Adapter")
    with pytest.raises(ProgramError, match=r"decline\(.*\) must take"):
        check_adapter(type("Adapter", (), {"decline": dict, "record": dict}), "odd:Adapter")


def use_folder(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.delenv(SHARED, raising=False)
    monkeypatch.setenv(FOLDER, str(folder))


def test_a_folder_of_counts_to_which_others_may_write_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "counts"
    folder.mkdir(0o700)
    use_folder(monkeypatch, folder)
    assert get_folder() == str(folder)
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match="no folder of this user alone"):
        get_folder()
    folder.chmod(0o700)
    (tmp_path / "link").symlink_to(folder)
    use_folder(monkeypatch, tmp_path / "link")
    with pytest.raises(ConfigError, match="no folder of this user alone"):
        statistics()
    use_folder(monkeypatch, tmp_path / "gone")
    assert statistics()["split"] == 0


def test_counts_that_are_none_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_folder(monkeypatch, tmp_path)
    file = tmp_path / "counter_dbo1.db"
    file.write_bytes((100).to_bytes(4, "little") + b"\xff" * 96)  # 100 bytes are used, it says
    with pytest.raises(ConfigError, match=r"counts in .*counter_dbo1\.db cannot be read .*Remove it"):
        statistics()
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(ConfigError, match=r"counter_dbo1\.db cannot be read: it is no file"):
        statistics()


def test_a_folder_for_traces_is_the_users_alone(tmp_path: Path) -> None:
    prepare_folder(str(tmp_path / "traces"))
    assert (tmp_path / "traces").stat().st_mode & 0o777 == 0o700
    with pytest.raises(ConfigError, match="cannot be made a folder"):
        prepare_folder("a\0b")
