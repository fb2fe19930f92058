"""The commands of `python -m dbo_runtime`: what they print, write and refuse, with no device and no framework."""

from __future__ import annotations

import json
import os
import re
import signal
import struct
import subprocess
import sys
import time
import types
from argparse import Action, ArgumentParser
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import dbo_runtime
from dbo_runtime import __main__ as program
from dbo_runtime.lab.whatif import plan_command
from dbo_runtime.lab.whatif.measurements import MEASUREMENTS
from dbo_runtime.lab.whatif.published_cases import get_case, list_cases
from dbo_runtime.lab.whatif.scale import set_layers
from dbo_runtime.lab.whatif.whatif import BreakEven
from dbo_runtime.observe.timeline import Timeline
from dbo_runtime.planner.costs.cost_file import load_costs, save_costs

ROOT = Path(dbo_runtime.__file__).parents[1]
FOREIGN = ("torch", "torch_npu", "vllm", "vllm_ascend", "matplotlib")


@pytest.fixture
def costs(tmp_path: Path) -> str:
    """Return the path of a cost file of four layers, which is planned in no time."""
    path = tmp_path / "costs.json"
    save_costs(set_layers(get_case("a3-layer-4894").table, (4,)), path)
    return str(path)


@pytest.fixture
def _no_break_even(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spare the search for a break-even, dozens of plans, where a test is about something else."""
    monkeypatch.setattr(plan_command, "compute_break_even", lambda *_: BreakEven(None, searched_to=1))


def run_plan(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    status = program.main(["plan", *words])
    output, errors = capsys.readouterr()
    assert (status, errors) == (0, "")
    return output


def test_a_plan_says_all_that_there_is_to_know(costs: str, capsys: pytest.CaptureFixture[str]) -> None:
    lines = run_plan(capsys, "--costs", costs, "--tokens", "4096", "--requests", "4").splitlines()
    assert lines[0] == f"costs: {costs}, modelled, 2026-11-21"
    text = "\n".join(lines)
    assert "vllm-project/vllm-ascend#4894" in text
    assert "step: 4096 tokens, 4 prompts of 1024; DeepSeek-V3, 4 layers, tensor parallel 8" in text
    assert "unsplit: 25.20 ms = 11.20 compute + 14.00 communication" in text
    assert re.search(r"^ +2 .* 1\.\d{3}x +\d+\.\d\d +1\.\d{3}x +optimal +\d+\.\d% +2048\+2048$", text, re.MULTILINE)
    assert re.search(r"^ +3 .* <?\d\.\d\d% +\d+\.\d% +\d+\+\d+\+\d+$", text, re.MULTILINE)
    assert text.count(" * ") == 1  # the best one
    assert re.search(r"^decision: +split in [23]: gains \d+\.\d%, more than the margin of 2\.0%$", text, re.MULTILINE)
    assert re.search(r"^break-even: \d+ tokens: from there on .* \(looked up to 32768\)$", text, re.MULTILINE)
    assert re.search(r"^order: +optimal-\S+; with these cuts n", text, re.MULTILINE)
    assert re.search(r"^ compute \|[.0-2]{100}\|$", text, re.MULTILINE)
    assert re.search(r"^ +comm \|[.0-2]{100}\|$", text, re.MULTILINE)


@pytest.mark.usefixtures("_no_break_even")
def test_a_plan_of_a_pipelines_stage_says_which(costs: str, capsys: pytest.CaptureFixture[str]) -> None:
    table = load_costs(costs)
    layout = {**table.provenance.parallel, "pipeline": 2, "stage": 1}
    save_costs(replace(table, provenance=replace(table.provenance, parallel=layout)), costs)
    assert ", pipeline parallel 2, stage 1\n" in run_plan(capsys, "--costs", costs, "--micro-batches", "2")


def test_figures_come_as_json_too(costs: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--costs", costs, "--query-lens", "2048,2048", "--micro-batches", "2", "--margin", "0.9", "--json")
    found = json.loads(run_plan(capsys, *words))
    assert (found["kind"], found["tokens"], found["layers"]) == ("modelled", 4096, 4)
    assert found["lanes_ms"]["compute"] + found["lanes_ms"]["comm"] == pytest.approx(found["unsplit_ms"])
    (split,) = found["splits"]
    assert split["speed_up"] == pytest.approx(found["unsplit_ms"] / split["ms"])
    assert split["proven_optimal"] is True
    assert split["bound_ms"] == split["ms"]
    assert (found["split"], found["break_even_tokens"]) == (False, None)  # nothing gains 90 %
    assert found["decision"].startswith("leave unsplit: no gain predicted")


@pytest.mark.usefixtures("_no_break_even")
def test_a_published_case_comes_with_its_step(capsys: pytest.CaptureFixture[str]) -> None:
    output = run_plan(capsys, "--costs", "910c-share-5591", "--micro-batches", "2")
    assert "costs: 910c-share-5591, modelled" in output
    assert "step: 8192 tokens, 2 prompts of 4096; DeepSeek-V3, 61 layers, tensor parallel 16" in output
    assert "the first 3 of 61 layers of micro-batch 0" in output


@pytest.mark.usefixtures("_no_break_even")
def test_costs_are_scaled_before_they_are_asked(costs: str, capsys: pytest.CaptureFixture[str]) -> None:
    machine = ("--tp", "16", "--bandwidth", "2x", "--model", "deepseek-v2-lite", "--micro-batches", "2")
    output = run_plan(capsys, "--costs", costs, "--tokens", "64", "--context", "100", *machine)
    assert "step: 64 tokens, 1 prompt of 64 after 100 in the KV cache; deepseek-v2-lite, 27 layers" in output
    assert "Scaled: tensor parallel 16 instead of 8. Scaled: bandwidth 2x." in " ".join(output.split())
    assert "leave unsplit: no gain predicted" in output


@pytest.mark.usefixtures("_no_break_even")
def test_decodes_are_a_step_too(costs: str, capsys: pytest.CaptureFixture[str]) -> None:
    output = run_plan(capsys, "--costs", costs, "--query-lens", "1,1,1,1", "--context", "512")
    assert "step: 4 tokens, 4 decodes after 512 in the KV cache;" in output
    assert "leave unsplit" in output
    assert run_plan(capsys, "--costs", costs, "--decodes", "4", "--context", "512") == output


@pytest.mark.usefixtures("_no_break_even")
def test_a_step_that_is_not_cut_says_what_is_concurrent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "decodes.json"
    save_costs(set_layers(get_case("r1-decode-910c").table, (1, 3)), path)
    words = ("--costs", str(path), "--decodes", "8", "--context", "4096", "--margin", "0.001", "--micro-batches", "2")
    output = run_plan(capsys, *words)
    assert "1, keys concurrent *" in output
    assert "decision:   1 micro-batch, keys concurrent: gains " in output
    assert "the first 3 of 4 layers of micro-batch 0" in output
    left = run_plan(capsys, *words, "--side", "off")
    assert "concurrent" not in left.partition("step:")[2]
    assert "leave unsplit" in left


@pytest.mark.slow
def test_measurements_are_compared_with_what_the_model_says(capsys: pytest.CaptureFixture[str]) -> None:
    note, table, misses, no_row = run_plan(capsys, "--measurements").rstrip().split("\n\n")
    head, *rows = table.splitlines()
    assert note.startswith("times faster in two micro-batches than unsplit; ! where the measurement contradicts")
    assert head.split()[:4] == ["published", "by", "case", "tokens"]
    assert len(rows) == len(MEASUREMENTS)
    missed = [row for row in rows if "!" in row]
    explained = re.findall(r"^  (\S.* tokens): ", misses, re.MULTILINE)
    assert misses.startswith("misses\n")
    assert len(explained) == len(missed) == sum(bool(one.miss) for one in MEASUREMENTS)
    assert no_row.startswith("no row\n")


@pytest.mark.slow
@pytest.mark.usefixtures("_no_break_even")
def test_the_machine_s_network_and_the_busiest_rank_are_options(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--micro-batches", "2", "--json")

    def predict(*options: str) -> tuple[str, float]:
        figures = json.loads(run_plan(capsys, *options, *words))
        return figures["source"], figures["lanes_ms"]["comm"]

    flat = ("--costs", "910b-share-5591", "--tp", "8")
    for network in ((), ("--network", "8:121.3GB/s:25GB/s")):
        source, _ = predict(*flat, *network)
        assert ("network 8:121.3GB/s:25GB/s" in source) == bool(network)
    assert predict(*flat, "--network", "8:121.3GB/s:25GB/s")[1] < predict(*flat)[1]
    source, uneven = predict("--costs", "a3-layer-4894", "--imbalance", "1.5")
    assert source.endswith("Scaled: imbalance 1.5.")
    assert uneven > predict("--costs", "a3-layer-4894")[1]


@pytest.mark.usefixtures("_no_break_even")
def test_a_step_that_cannot_be_cut_is_told_so(costs: str, capsys: pytest.CaptureFixture[str]) -> None:
    output = run_plan(capsys, "--costs", costs, "--tokens", "1")
    assert "step: 1 token, 1 request;" in output
    assert "this step cannot be cut" in output
    assert "leave unsplit: nowhere to cut" in output


@pytest.mark.usefixtures("_no_break_even")
def test_a_trace_and_a_figure_are_written(costs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    trace, figure = tmp_path / "trace.json", tmp_path / "figure.png"
    run_plan(capsys, "--costs", costs, "--micro-batches", "2", "--trace", str(trace), "--figure", str(figure))
    events = json.loads(trace.read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == 2 * 4 * 7  # micro-batches, layers, ops
    header = figure.read_bytes()[:24]
    assert header.startswith(b"\x89PNG")
    assert min(struct.unpack(">II", header[16:])) > 100


@pytest.mark.usefixtures("_no_break_even")
def test_a_figure_of_many_layers_shows_a_few_of_the_middle_and_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn: list[tuple[dict[str, Timeline], str]] = []
    monkeypatch.setattr(plan_command, "draw_figure", lambda panels, path, title: drawn.append((panels, title)))
    words = ("--costs", "910c-share-5591", "--micro-batches", "2", "--figure", str(tmp_path / "figure.png"))
    run_plan(capsys, *words)
    ((panels, title),) = drawn
    assert title == "910c-share-5591, 8192 tokens (predicted): layers 29 to 31 of 61"
    assert list(panels) == ["unsplit", "split in 2"]
    for timeline in panels.values():
        assert {span.op.partition(".")[0] for span in timeline.spans} == {"L29", "L30", "L31"}


def test_the_list_of_cases_has_one_line_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    lines = run_plan(capsys, "--list").splitlines()
    assert len(lines) == 1 + len(list_cases()) + 2
    (row,) = (line for line in lines if line.startswith("r1-tp16-941 "))
    assert re.split(" {2,}", row)[1:] == ["16384 tokens in 4 prompts", "DeepSeek-R1 W8A8", "16 x Ascend 910B"]


def test_one_case_is_told_with_its_kind_and_source(capsys: pytest.CaptureFixture[str]) -> None:
    for name, number in (("a3-layer-4894", 4894), ("910c-share-5591", 5591), ("r1-tp16-941", 941)):
        output = run_plan(capsys, "--list", name)
        assert output.startswith(f"{name} (modelled; ")
        assert f"vllm-project/vllm-ascend#{number}" in output


def test_a_sweep_of_one_axis_has_all_figures(costs: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [line.split() for line in run_plan(capsys, "--costs", costs, "--sweep", "tokens").splitlines()]
    assert rows[0] == ["tokens", "unsplit", "ms", "best", "ms", "gain", "in", "auto"]
    assert [row[0] for row in rows[1:9]] == ["256", "512", "1024", "2048", "4096", "8192", "16384", "32768"]
    assert rows[1][-1] == "unsplit"  # too small to pay
    assert rows[8][-1] in "23"
    assert [" ".join(row[:-2]) for row in rows[10:]] == [
        "auto leaves steps unsplit: below",
        "auto does not split them: below",
    ]


@pytest.mark.slow
def test_a_sweep_of_two_axes_is_a_table_up_to_a_thousand_chips(costs: str, capsys: pytest.CaptureFixture[str]) -> None:
    note, blank, head, *rows = run_plan(
        capsys, "--costs", costs, "--sweep", "bandwidth,tp", "--micro-batches", "2"
    ).splitlines()
    assert note.startswith(
        "speed-up/micro-batches of the best split; - where it does not pay (by 2.0%, and if costs are off)"
    )
    assert blank == ""
    assert head.split() == ["bandwidth", "\\", "tp", "4", "8", "16", "32", "64", "128", "256", "512", "1024"]
    assert [row.split()[0] for row in rows] == ["0.25x", "0.5x", "1x", "2x", "4x"]
    assert {len(row) for row in (head, *rows)} == {len(head)}  # aligned
    cells = [cell for row in rows for cell in row.split()[1:]]
    assert len(cells) == 45
    assert "-" in cells
    assert all(re.fullmatch(r"-|\d\.\d\d/2", cell) for cell in cells)


def test_a_sweep_of_three_axes_is_a_table_for_each_value_of_the_first(
    costs: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--sweep", "bandwidth,tokens,tp", "--micro-batches", "2")
    _, *tables = run_plan(capsys, "--costs", costs, *words).strip().split("\n\n")
    assert [table.splitlines()[0] for table in tables] == ["bandwidth 0.25x", "bandwidth 1x", "bandwidth 4x"]
    assert all(len(table.splitlines()) == 2 + 4 for table in tables)


def test_a_sweep_comes_as_json_too(costs: str, capsys: pytest.CaptureFixture[str]) -> None:
    cells = json.loads(run_plan(capsys, "--costs", costs, "--sweep", "bandwidth", "--json"))
    assert [cell["bandwidth"] for cell in cells] == [0.25, 0.5, 1, 2, 4]
    assert all(cell["split"] == (cell["split_ms"] < 0.98 * cell["unsplit_ms"]) for cell in cells)


@pytest.mark.usefixtures("_no_break_even")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--tokens 8192", "--costs is missing"),
        ("--costs a4-layer", "neither a file nor a published case; did you mean a3-layer-4894?"),
        ("--costs r1-tp16-914", "neither a file nor a published case; did you mean r1-tp16-941?"),
        ("--list r1-tp16-914", "there is no published case 'r1-tp16-914'; did you mean r1-tp16-941?"),
        ("--costs FOLDER/cost.json", "cost.json cannot be read: there is none; did you mean COSTS?"),
        ("--costs COSTS --tokens 0", "--tokens has '0'; it takes whole numbers from 1"),
        ("--costs COSTS --tokens many", "--tokens has 'many'"),
        ("--costs COSTS --tokens 99999999", "--tokens has '99999999'"),
        ("--costs COSTS --requests 9 --tokens 8", "--requests is 9, but there are 8 tokens"),
        ("--costs COSTS --query-lens 5,,5", "--query-lens has ''"),
        ("--costs COSTS --query-lens 5 --tokens 5", "--query-lens says everything about the requests"),
        ("--costs COSTS --decodes 5 --tokens 5", "--decodes says everything about the requests"),
        ("--costs COSTS --query-lens 5 --decodes 5", "leave out --decodes"),
        ("--costs COSTS --decodes 0", "--decodes has '0'"),
        ("--costs COSTS --side left", "--side='left'"),
        ("--costs COSTS --context -1", "--context has '-1'"),
        ("--costs COSTS --tp 12", "tp is 12; it must be a power of two"),
        ("--costs COSTS --tp 0", "--tp has '0'"),
        ("--costs COSTS --bandwidth fast", "bandwidth is 'fast'"),
        ("--costs COSTS --tp 4 --network 8", "network is '8'; it must be ranks of a host"),
        ("--costs COSTS --imbalance much", "--imbalance is 'much'; it takes a number such as 1.3"),
        ("--costs COSTS --imbalance 0.5", "imbalance is 0.5; the busiest rank has at least 1 times"),
        ("--costs COSTS --model gpt", "model is 'gpt'; known are deepseek-v3"),
        ("--costs COSTS --micro-batches 1", "--micro-batches='1' is not allowed"),
        ("--costs COSTS --margin lots", "--margin='lots' is not allowed"),
        ("--costs COSTS --policy best", "--policy='best' is not allowed"),
        ("--costs COSTS --sweep chips", "sweep is 'chips'"),
        ("--costs COSTS --sweep tokens,tokens", "each once"),
        ("--costs COSTS --sweep tp --trace t.json", "--trace and --figure show one step"),
        ("--costs COSTS --tokens 64 --trace /nowhere/t.json", "cannot be written to path '/nowhere/t.json'"),
    ],
)
def test_what_cannot_be_answered_is_one_line_on_standard_error(
    words: str, message: str, costs: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = words.replace("COSTS", costs).replace("FOLDER", str(Path(costs).parent))
    assert program.main(["plan", *words.split()]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("dbo_runtime plan: ")
    assert message.replace("COSTS", costs) in errors
    assert errors.count("\n") == 1


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 7}', '{"format": 1}', "\x00"])
def test_a_corrupt_file_is_named(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "corrupt.json"
    path.write_text(text)
    assert program.main(["plan", "--costs", str(path)]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith(f"dbo_runtime plan: cost file {path}: ")
    assert errors.count("\n") == 1


@pytest.mark.parametrize("words", [[], ["bogus"], ["plan", "--bogus"], ["--bogus", "plan"], ["--", "plan"]])
def test_unknown_commands_and_arguments_show_the_usage(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        program.main(words)
    assert stopped.value.code == 2
    assert capsys.readouterr().err.startswith("usage: python -m dbo_runtime")


def test_a_misspelt_command_has_a_neighbour(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        program.main(["plann", "--tokens", "64"])
    assert "there is no command 'plann'; did you mean plan?" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["plan", "--tokns", "64"], "--tokens"),
        (["plan", "--tokns=64"], "--tokens"),
        (["plan", "--scale", "r1-prefill-910"], "r1-prefill-910c"),
        (["plan", "--costs", "r1-tp16-941", "--model", "deepsek-v3"], "deepseek-v3"),
        (["calibrate", "examples/tiny-deepsek", "--output", "costs.json"], "examples/tiny-deepseek"),
        (["soak", "examples/tiny-deepsek"], "examples/tiny-deepseek"),
        (["doctor", "--", "vllm", "serve", "examples/tiny-deepsek"], "examples/tiny-deepseek"),
    ],
    ids=" ".join,
)
def test_misspelt_words_have_a_neighbour(
    words: list[str], meant: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a model's path, which vLLM would take for a name on a hub and look for there."""
    monkeypatch.chdir(Path(__file__).parents[1])
    monkeypatch.setattr(program, "find_spec", lambda name: name)  # vLLM may be absent: nothing asks it
    with suppress(SystemExit):  # argparse's way to refuse
        assert program.main(words) != 0
    printed = capsys.readouterr()
    assert f"did you mean {meant}" in printed.err + printed.out


@pytest.mark.parametrize("words", [["--help"], ["plan", "--help"], ["--version"]])
def test_help_and_version_are_printed(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        program.main(words)
    assert stopped.value.code == 0
    assert ("plan" in capsys.readouterr().out) == ("--help" in words)


def test_help_imports_no_command_and_nothing_heavy() -> None:
    code = """
import sys
from dbo_runtime.__main__ import COMMANDS, main
try:
    main(["--help"])
except SystemExit:
    heavy = {"torch", "vllm", "numpy", *(command.module for command in COMMANDS.values())}
    sys.stderr.write(str(sorted(heavy & set(sys.modules))))
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "[]")
    assert all(name in done.stdout for name in program.COMMANDS)


@pytest.mark.parametrize("script", ["dbo", "python -m dbo_runtime"])
def test_help_names_the_program_as_it_was_called(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [f"/usr/bin/{script}" if script == "dbo" else "/here/dbo_runtime/__main__.py"])
    for words, usage in ((["--help"], f"usage: {script} [-h]"), (["plan", "--help"], f"usage: {script} plan [-h]")):
        with pytest.raises(SystemExit):
            program.main(words)
        assert capsys.readouterr().out.startswith(usage)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib came with Python 3.11")
def test_pip_installs_the_script() -> None:
    import tomllib

    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {program.SCRIPT: "dbo_runtime.__main__:main"}


@pytest.mark.parametrize("name", program.COMMANDS)
def test_every_command_answers_programs_too(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    needs = program.COMMANDS[name].needs
    if needs is not None and find_spec(needs) is None:
        pytest.skip(f"{needs} is not installed")
    with pytest.raises(SystemExit) as stopped:
        program.main([name, "--help"])
    assert stopped.value.code == 0
    assert "--json" in capsys.readouterr().out


def list_options(name: str) -> list[Action]:
    parser = ArgumentParser()
    import_module(program.COMMANDS[name].module).add_arguments(parser)
    return [action for action in parser._actions if action.dest != "help"]


@pytest.mark.parametrize("name", program.COMMANDS)
def test_help_describes_every_option_with_its_default_and_unit(name: str) -> None:
    needs = program.COMMANDS[name].needs
    if needs is not None and find_spec(needs) is None:
        pytest.skip(f"{needs} is not installed")
    for option in list_options(name):
        assert option.help, option.dest
        if option.nargs != 0 and option.default not in (None, [], ""):
            assert f"(default: {option.default}" in option.help.replace("%(default)s", str(option.default)), option.dest
        takes_value = option.option_strings and option.nargs != 0
        assert not takes_value or option.metavar, f"{option.dest}: name the value, or its unit"


def run_render(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> str:
    assert program.main(["render", *words]) == status
    output, errors = capsys.readouterr()
    assert errors == ""
    return output


def test_a_schedule_in_nano_batches_is_printed_and_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--costs", "llama70b-tp8-11329", "--layers", "2", "--nano-batches", "2"]
    printed = run_render(capsys, *words)
    assert "layers 2; nano-batches 2; alternate" in printed
    assert "L0.mlp#1/0" in printed
    assert "L0.attention/0" in printed
    assert "L0.attention#" not in printed
    path = tmp_path / "schedule.txt"
    path.write_text(printed)
    assert "valid; the same as" in run_render(capsys, *words, "--check", str(path))
    assert json.loads(run_render(capsys, *words, "--json"))["nano_batches"] == 2


@pytest.mark.parametrize("count", ["0", "65"])
def test_a_number_of_nano_batches_that_is_not_allowed_is_named(count: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["render", "--costs", "llama70b-tp8-11329", "--nano-batches", count]) == 2
    assert f"--nano-batches is {count}; it must be 1 to 64" in capsys.readouterr().err


def test_the_source_of_a_schedule_is_printed_behind_its_table(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--costs", "a3-layer-4894", "--source")
    printed = run_render(capsys, *words)
    table, _, source = printed.partition("\ndef issue(values, enter):\n")
    assert table == run_render(capsys, *words[:2])
    assert "op_L0_dispatch(" in source
    assert json.loads(run_render(capsys, *words, "--json"))["source"].endswith(source)


@pytest.mark.parametrize("policy", ["optimal", "sequential", "staggered:2"])
def test_a_schedule_is_printed_with_waits_records_and_frees(policy: str, capsys: pytest.CaptureFixture[str]) -> None:
    case = ("--costs", "r1-tp16-941", "--policy", policy)
    about, counts, head, *rows = run_render(capsys, *case).splitlines()
    assert about == f"# r1-tp16-941; layers 4; micro-batches 2; {policy}"  # one of each run of equal layers
    assert re.fullmatch(r"# 40 instructions, \d+ waits, digest \w{16}; all rules of validation hold", counts)
    assert head.split() == ["#", "compute", "comm"]
    assert rows[0].split() == ["0", "L0.attention/0", "*"]
    assert re.search(r"^ +\d+ +L0\.attn_reduce/0 \*? +wait L0\.attention/0", "\n".join(rows), re.MULTILINE)
    assert re.search(r"  free %\d+/\d", "\n".join(rows))


def test_layers_and_micro_batches_are_as_many_as_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--costs", "a3-layer-4894", "--layers", "5", "--micro-batches", "3", "--policy", "alternate", "--json")
    shown = json.loads(run_render(capsys, *words))
    instructions = shown["instructions"]
    assert (shown["layers"], shown["micro_batches"], shown["policy"]) == (5, 3, "alternate")
    assert {instruction["op"].partition(".")[0] for instruction in instructions} == {f"L{layer}" for layer in range(5)}
    assert {instruction["op"].rpartition("/")[2] for instruction in instructions} == {"0", "1", "2"}
    assert shown["forks"] == ["comm"]
    assert all(instruction["lane"] in shown["lanes"] for instruction in instructions)


def test_a_printed_schedule_is_read_back_and_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "schedule.txt"
    case = ("--costs", "r1-tp16-941", "--policy", "alternate")
    path.write_text(run_render(capsys, *case))
    assert "valid; the same as" in run_render(capsys, *case, "--check", str(path))
    assert "valid; another than" in run_render(capsys, *case[:2], "--policy", "sequential", "--check", str(path))
    path.write_text(re.sub(r"wait L0\.attention/0", "", path.read_text()))
    told = run_render(capsys, *case, "--check", str(path), status=1)
    assert told.startswith(f"{path}: not valid: rule 7, instruction 1: lane 'comm' starts")
    told = json.loads(run_render(capsys, *case, "--check", str(path), "--json", status=1))
    assert (told["valid"], told["same"]) == (False, False)
    assert told["problem"].startswith("rule 7")


def test_a_schedule_of_another_program_is_not_valid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "schedule.txt"
    path.write_text(run_render(capsys, "--costs", "a3-layer-4894"))
    told = run_render(capsys, "--costs", "r1-tp16-941", "--check", str(path), status=1)
    assert "cannot be read ('L0.gather/0')" in told


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--costs a4-layer", "neither a file nor a published case"),
        ("--costs r1-tp16-941 --layers 3", "--layers is 3; the program of these costs can be shown with 4 to 61"),
        ("--costs r1-tp16-941 --layers 62", "--layers is 62"),
        ("--costs r1-tp16-941 --policy best", "--policy='best' is not allowed"),
        ("--costs r1-tp16-941 --micro-batches 1", "--micro-batches='1' is not allowed"),
        ("--costs r1-tp16-941 --micro-batches 99999", "it takes auto, or a whole number, at least 2, at most 64"),
        ("--costs r1-tp16-941 --check /nowhere/schedule.txt", "schedule /nowhere/schedule.txt cannot be read"),
    ],
)
def test_what_cannot_be_rendered_is_one_line_on_standard_error(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program.main(["render", *words.split()]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("dbo_runtime render: ")
    assert message in errors
    assert errors.count("\n") == 1


def test_calibrate_needs_vllm_and_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert program.main(["calibrate", "model", "--output", "costs.json"]) == 2
    assert capsys.readouterr().err == (
        "dbo_runtime calibrate: needs vllm, which is not installed: pip install 'dbo-runtime[vllm]'\n"
    )


def test_what_a_command_does_not_know_is_passed_on_if_it_wants_that(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    module = types.ModuleType("a_command")
    module.add_arguments = lambda parser: parser.add_argument("model")  # type: ignore[attr-defined]
    module.run = lambda arguments: seen.append((arguments.model, arguments.passed_on)) or 3  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "a_command", module)
    commands = {"measure": program.Command("a_command", "measure", passes_on=True)}
    monkeypatch.setattr(program, "COMMANDS", commands)
    assert program.main(["measure", "tiny", "--tensor-parallel-size", "2", "--enforce-eager"]) == 3
    assert seen == [("tiny", ["--tensor-parallel-size", "2", "--enforce-eager"])]


def test_planning_needs_no_device_and_no_framework(costs: str) -> None:
    blocked = "".join(f"sys.modules[{name!r}] = None; " for name in FOREIGN)
    code = f"""
import runpy, sys; {blocked}
sys.argv = ["dbo_runtime", "plan", "--costs", {costs!r}, "--tokens", "512", "--micro-batches", "2"]
runpy.run_module("dbo_runtime", run_name="__main__")
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "step: 512 tokens, 1 prompt of 512;" in done.stdout


def test_the_module_is_a_program(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "dbo_runtime", "plan", "--costs", "nothing"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run(words, env=env, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("dbo_runtime plan: costs 'nothing' are neither a file nor a published case")


# Where a shell runs the tests in the background, they and what they start ignore interrupts.
HEARS_INTERRUPTS = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"


def start_program(code: str, *folders: Path, **options: Any) -> subprocess.Popen[str]:
    """Start Python with *code*, with *folders* on its path, in a process group of its own."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, folders), str(ROOT), *sys.path])}
    words = [sys.executable, "-c", HEARS_INTERRUPTS + code]
    return subprocess.Popen(words, env=env, stderr=subprocess.PIPE, text=True, start_new_session=True, **options)


def wait_for(path: Path, seconds: float = 60.0) -> str:
    """Return the content of a file once there is some."""
    deadline = time.monotonic() + seconds
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < deadline, f"{path} is still missing"
        time.sleep(0.05)
    return path.read_text()


@pytest.mark.parametrize(
    ("words", "status"),
    [(["plan", "--list"], program.BROKEN_PIPE), (["--help"], 0)],  # argparse itself overlooks a closed pipe
)
def test_a_reader_that_leaves_early_gets_no_traceback(words: list[str], status: int) -> None:
    read, write = os.pipe()
    os.close(read)  # as `| head` does, only before the first line
    done = start_program(f"import sys; from dbo_runtime.__main__ import main; sys.exit(main({words}))", stdout=write)
    os.close(write)
    assert done.communicate(timeout=60)[1] == ""
    assert done.returncode == status


def test_an_interrupt_is_one_line(tmp_path: Path) -> None:
    """Stands for any command: one that says that it runs, and sleeps."""
    started = tmp_path / "started"
    code = f"""
import sys, time, types
from pathlib import Path
from dbo_runtime import __main__ as program
module = types.ModuleType("a_command")
module.add_arguments = lambda parser: None
module.run = lambda arguments: Path({str(started)!r}).write_text("yes") and time.sleep(60)
sys.modules["a_command"] = module
program.COMMANDS = {{"sleep": program.Command("a_command", "sleep")}}
sys.exit(program.main(["sleep"]))
"""
    process = start_program(code)
    wait_for(started)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=30)[1] == "dbo_runtime sleep: interrupted.\n"
    assert process.returncode == program.INTERRUPTED


@pytest.mark.skipif(find_spec("vllm") is None or find_spec("hypothesis") is None, reason="soak needs both")
def test_an_interrupt_ends_the_engines_of_a_soak_at_once(tmp_path: Path) -> None:
    started = tmp_path / "started"
    (tmp_path / "sleeper.py").write_text(
        f"import os, time, pathlib; pathlib.Path({str(started)!r}).write_text(str(os.getpid())); time.sleep(600)"
    )
    code = """
import sys
from dbo_runtime.__main__ import main
from dbo_runtime.lab.soak import engine_process
engine_process.MODULE = "sleeper"
sys.exit(main(["soak", "model"]))
"""
    process = start_program(code, tmp_path)
    engine = int(wait_for(started))
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=20)[1] == "dbo_runtime soak: interrupted.\n"
    assert process.returncode == program.INTERRUPTED
    with pytest.raises(ProcessLookupError):
        os.kill(engine, 0)
