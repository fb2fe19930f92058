"""Cost files: what is saved comes back, and nothing else is let in."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbo_runtime.errors import ConfigError
from dbo_runtime.ir.program import Program
from dbo_runtime.planner.costs.cost_file import (
    format_costs,
    list_stage_files,
    load_costs,
    name_stage_file,
    parse_costs,
    save_costs,
)
from dbo_runtime.planner.costs.op_cost import CommCost, ComputeCost, HostCost
from dbo_runtime.planner.costs.program_spec import describe_program
from tests.support.planner.cost_tables import make_provenance, make_table
from tests.support.programs import record_three_lanes
from tests.support.strategies import programs

SECONDS = st.floats(0, 1e3).filter(lambda seconds: seconds == 0 or seconds > 1e-30)
SIGNED = SECONDS | SECONDS.map(lambda seconds: -seconds)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "costs.json"


def test_a_table_comes_back_equal(path: Path) -> None:
    save_costs(make_table(), path)
    assert load_costs(path) == make_table()
    assert load_costs(str(path)).digest == make_table().digest


def test_each_stage_of_a_pipeline_has_a_file_of_its_own(tmp_path: Path) -> None:
    folder = tmp_path / "of.two[2]"
    folder.mkdir()
    path = str(folder / "costs.json")
    assert name_stage_file(path, None) == path
    assert name_stage_file("costs", "pp0") == "costs.pp0"
    assert list_stage_files(path) == []
    files = [name_stage_file(path, f"pp{stage}") for stage in (0, 2, 10)]
    for file in (*files[::-1], path, str(folder / "other.pp1.json"), str(folder / "costs.pp1.txt")):
        Path(file).touch()
    assert list_stage_files(path) == files
    assert [Path(file).name for file in files] == ["costs.pp0.json", "costs.pp2.json", "costs.pp10.json"]


def test_a_file_from_before_split_steps_were_compared_says_nothing_of_them(path: Path) -> None:
    save_costs(make_table(), path)
    older = {name: value for name, value in json.loads(path.read_text()).items() if name != "split_error"}
    assert parse_costs(json.dumps(older)) == make_table(split_error=0.0)


def test_the_text_of_a_file_is_read_without_one(path: Path) -> None:
    save_costs(make_table(), path)
    assert path.read_text(encoding="utf-8") == format_costs(make_table())
    assert parse_costs(format_costs(make_table())) == make_table()
    with pytest.raises(ConfigError, match=r"^kind is missing"):
        parse_costs('{"format": 1}')


@given(
    compute=st.builds(ComputeCost, SECONDS, SECONDS, SECONDS, SECONDS, st.booleans()),
    comm=st.builds(CommCost, SECONDS, SECONDS, st.floats(0, 1e9)),
    host=st.builds(HostCost, SECONDS, st.booleans(), SIGNED, SIGNED),
    contention=st.dictionaries(st.sampled_from(["compute", "comm"]), st.floats(1, 100)),
    errors=st.dictionaries(st.sampled_from(["mlp", "attention"]), st.floats(0, 100)),
    split_error=st.floats(0, 100),
    source=st.text(),
)
def test_any_numbers_come_back_the_very_same(
    tmp_path_factory: pytest.TempPathFactory, compute: Any, comm: Any, source: str, **changes: Any
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.json"
    table = make_table({"mlp": compute, "mlp_reduce": comm}, provenance=make_provenance(source=source), **changes)
    save_costs(table, path)
    assert load_costs(path) == table
    assert load_costs(path).digest == table.digest


@given(programs())
def test_any_program_comes_back(tmp_path_factory: pytest.TempPathFactory, program: Program) -> None:
    path = tmp_path_factory.getbasetemp() / "any.json"
    ops: dict[str, Any] = {op.name: CommCost(0, 0, 1) if op.lane == "comm" else ComputeCost() for op in program.ops}
    table = make_table(ops, program=describe_program(program), contention={})
    save_costs(table, path)
    assert load_costs(path) == table


def test_times_are_in_microseconds_and_short_things_stand_in_one_line(path: Path) -> None:
    save_costs(make_table(program=describe_program(record_three_lanes(1)), ops=THREE_LANES), path)
    lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    assert lines[1:4] == ['"format": 1,', '"kind": "measured",', '"source": "a test",']
    assert '"machine": {"platform": "cpu", "chip": "A"},' in lines
    assert '"mlp_reduce": {"alpha_us": 20.0, "beta_us_per_byte": 0.0001, "bytes_per_token": 14336.0},' in lines
    assert '"host": {"issue_us": 5.0, "computes": true, "whole_us": -1000.0, "split_us": 2000.0},' in lines
    assert (
        '{"name": "combine", "lane": "comm", "reads": ["experts"], "exclusive": "a2a", "communicator": "comm", '
        '"overwrites": ["experts"]},'
    ) in lines
    assert max(len(line) for line in path.read_text(encoding="utf-8").splitlines()) <= 140  # characters


THREE_LANES: dict[str, Any] = {
    **{name: ComputeCost() for name in ("norm", "shared", "experts", "merge")},
    **{name: CommCost(0, 0, 1) for name in ("dispatch", "combine")},
}


def test_saving_replaces_the_file_and_leaves_nothing_else(path: Path) -> None:
    save_costs(make_table(), path)
    save_costs(make_table(errors={}), path)
    assert load_costs(path) == make_table(errors={})
    assert os.listdir(path.parent) == [path.name]


def test_a_file_that_cannot_be_replaced_stays_and_no_draft_is_left(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_costs(make_table(), path)

    def fail(*_: Any) -> None:
        raise OSError("no space")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(ConfigError, match=r"costs\.json cannot be written \(no space\)\. Name a file in a writable"):
        save_costs(make_table(errors={}), path)
    assert load_costs(path) == make_table()
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize("is_file", [False, True], ids=["not there", "a file"])
def test_a_folder_that_is_none_is_named(is_file: bool, tmp_path: Path) -> None:
    if is_file:
        (tmp_path / "nowhere").touch()
    with pytest.raises(ConfigError, match=r"cost file .*nowhere/costs\.json cannot be written"):
        save_costs(make_table(), tmp_path / "nowhere" / "costs.json")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", r"costs\.json: it is not JSON"),
        ("{", r"costs\.json: it is not JSON"),
        ("[" * 100_000, r"costs\.json: it is nested more than 64 deep"),
        (b"\xff\xfe", r"costs\.json cannot be read"),
        ("[]", "format is None; this version of dbo_runtime reads format 1"),
        ("{}", "format is None; this version"),
        ('{"format": 2}', "format is 2; this version"),
        ('{"format": true}', "format is True; this version"),
        ('{"format": 1}', "kind is missing"),
        ('{"format": 1, "host": {"issue_us": 1, "issue_us": 2}}', "issue_us appears twice in one object"),
    ],
)
def test_what_is_no_cost_file_is_refused(path: Path, text: str | bytes, says: str) -> None:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=says) as raised:
        load_costs(path)
    assert str(raised.value).endswith("Correct the file, or measure anew: `dbo calibrate`.")


def test_a_file_that_is_not_there_is_named(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cost file .*costs\.json cannot be read: No such file.*calibrate"):
        load_costs(path)


DELETED = object()


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("kind", "guessed", "kind is 'guessed'"),
        ("source", 5, "source is 5; it must be text"),
        ("extra", 5, "extra is unknown; known are format, kind,"),
        ("machine", [], r"machine is \[\]; it must be an object"),
        ("machine.chip", None, r"machine\.chip is None; it must be text"),
        ("parallel.tensor", 2.0, r"parallel\.tensor is 2.0; it must be a whole number"),
        ("program", DELETED, "program is missing"),
        ("program.inputs", "x", r"program\.inputs is 'x'; it must be a list"),
        ("program.inputs.0", 1, r"program\.inputs\[0\] is 1; it must be text"),
        ("program.runs.1.repeat", 0, r"program\.runs\[1\]\.repeat is 0; it must be from 1 to 10000"),
        ("program.runs.1.repeat", True, r"program\.runs\[1\]\.repeat is True; it must be a whole number"),
        ("program.runs.1.layered", 1, r"program\.runs\[1\]\.layered is 1; it must be true or false"),
        ("program.runs.0.ops.0.name", DELETED, r"program\.runs\[0\]\.ops\[0\]\.name is missing"),
        ("program.runs.0.ops.0.read", [], r"program\.runs\[0\]\.ops\[0\]\.read is unknown"),
        ("program.runs.0.ops.0.reads", ["y"], r"program\.runs\[0\]\.ops\[0\]\.reads has 'y', which no input"),
        ("program.runs.0.ops.0.outputs", -1, r"program\.runs\[0\]\.ops\[0\]\.outputs is -1; it must be from 0"),
        ("program.runs.0.ops.0.exclusive", 1, r"program\.runs\[0\]\.ops\[0\]\.exclusive is 1; it must be text"),
        ("program.outputs", ["y"], r"program\.outputs has 'y'"),
        ("ops.attention", 5, r"ops\.attention is 5; it must be an object"),
        ("ops.attention", DELETED, r"ops\.attention is missing"),
        ("ops.attention.per_token_us", -1, r"ops\.attention\.per_token_us is -1; .* of at least 0"),
        ("ops.attention.per_token_us", float("nan"), r"ops\.attention\.per_token_us is nan; it must be a finite"),
        ("ops.attention.per_token_us", float("inf"), r"ops\.attention\.per_token_us is inf; it must be a finite"),
        (
            "ops.attention.per_token_us",
            10**400,
            r"ops\.attention\.per_token_us is 1000.*; it must be a number that a f",
        ),
        ("ops.attention.per_token_us", "1", r"ops\.attention\.per_token_us is '1'; it must be a number"),
        ("ops.attention.per_token_us", True, r"ops\.attention\.per_token_us is True; it must be a number"),
        ("ops.attention.per_token_us", DELETED, r"ops\.attention\.per_token_us is missing"),
        ("ops.attention.per_token", 1, r"ops\.attention\.per_token is unknown; known are fixed_us, per_token_us,"),
        ("ops.attention.per_context_pair_us", DELETED, r"ops\.attention\.per_context_pair_us is missing"),
        ("ops.mlp_reduce.bytes_per_token", -1, r"ops\.mlp_reduce\.bytes_per_token is -1"),
        ("ops.mlp_reduce.beta_us_per_byte", DELETED, r"ops\.mlp_reduce\.beta_us_per_byte is missing"),
        ("ops.mlp.alpha_us", 1, r"ops\.mlp\.fixed_us is unknown; known are alpha_us, beta_us_per_byte"),
        ("contention.comm", 0.5, r"contention\.comm is 0.5; it must be a finite number of at least 1"),
        ("contention.com", 1, r"contention\.com is unknown"),
        ("host.computes", "yes", r"host\.computes is 'yes'; it must be true or false"),
        ("host.whole_us", None, r"host\.whole_us is None; it must be a number"),
        ("errors.mlp", -1, r"errors\.mlp is -1"),
        ("split_error", "none", r"split_error is 'none'; it must be a number"),
    ],
)
def test_a_wrong_field_is_named_with_its_path(path: Path, field: str, value: Any, says: str) -> None:
    save_costs(make_table(), path)
    content = json.loads(path.read_text(encoding="utf-8"))
    *parents, last = [int(word) if word.isdecimal() else word for word in field.split(".")]
    at = content
    for word in parents:
        at = at[word]
    if value is DELETED:
        del at[last]
    else:
        at[last] = value
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"^cost file .*costs\.json: " + says):
        load_costs(path)


def test_integers_and_defaults_left_out_are_taken(path: Path) -> None:
    save_costs(make_table(), path)
    content = json.loads(path.read_text(encoding="utf-8"))
    content["ops"]["mlp_norm"]["fixed_us"] = 2
    content["program"]["runs"][0]["ops"][1]["exclusive"] = None
    path.write_text(json.dumps(content), encoding="utf-8")
    assert load_costs(path).digest == make_table().digest
    assert "host_sync" not in content["program"]["runs"][0]["ops"][1]
