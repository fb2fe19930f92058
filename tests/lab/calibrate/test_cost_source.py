"""Costs from calibration and from files: used by all ranks or by none, and whatever goes wrong, serving goes on."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from dbo_runtime.batch import Batch
from dbo_runtime.config import RuntimeConfig
from dbo_runtime.decline import DeclineError
from dbo_runtime.engine.statistics import Statistics
from dbo_runtime.errors import ConfigError
from dbo_runtime.lab.calibrate import calibration, measurement
from dbo_runtime.lab.calibrate.divided_costs import list_token_wise
from dbo_runtime.lab.calibrate.measurement import Measurements
from dbo_runtime.lab.calibrate.report import Report
from dbo_runtime.lab.calibrate.shapes import Shape
from dbo_runtime.planner.costs.cost_file import load_costs
from dbo_runtime.planner.costs.program_spec import describe_program
from dbo_runtime.planner.online.planner import Planner
from dbo_runtime.vllm_plugin.install import cost_source, worker_setup
from dbo_runtime.vllm_plugin.step.forward import SplitForward
from dbo_runtime.vllm_plugin.step.warm_up import Phase
from tests.support.vllm.costs import (
    FEW_SHAPES,
    Lines,
    calibrate_few,
    forget_costs,
    get_costs,
    make_planner,
    measure_few,
)
from tests.support.vllm.engine import Engine, make_prompt
from tests.support.vllm.engines import TINY, find_transport

PROMPTS = [make_prompt(150, 1), make_prompt(150, 2)]
REMEDY = "dbo calibrate"


@pytest.fixture
def forward(one_rank: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[SplitForward]:
    """Return the forward of the served model, which counts anew; afterwards it plans without costs again."""
    forward: SplitForward = one_rank.runner.get_model().forward
    monkeypatch.setattr(forward.runtime, "statistics", Statistics())
    yield forward
    forward.runtime.planner = None
    one_rank.configure()


@pytest.fixture
def log(forward: SplitForward, monkeypatch: pytest.MonkeyPatch) -> Lines:
    """Return what is logged of costs."""
    lines = Lines()
    monkeypatch.setattr(get_costs(forward), "_log", lines)
    return lines


@pytest.fixture(scope="module")
def calibrated(one_rank: Engine, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    """Return the cost file of a calibration, its report, and the digest of the costs that were planned by."""
    path = tmp_path_factory.mktemp("costs") / "costs.json"
    report, digest = one_rank.llm.collective_rpc(calibrate_few, args=(str(path),))[0]
    one_rank.llm.collective_rpc(forget_costs)
    return path, report, digest


@pytest.fixture(scope="module")
def found(one_rank: Engine) -> Measurements:
    """Return what a calibration measures."""
    measurements: Measurements = one_rank.llm.collective_rpc(measure_few)[0][0]
    return measurements


def test_calibration_writes_a_file_with_what_the_rank_plans_by(
    calibrated: tuple[Path, str, str], forward: SplitForward
) -> None:
    path, _, digest = calibrated
    table = load_costs(path)
    assert table.digest == digest
    assert table.program == describe_program(forward.runtime.program)
    program = forward.runtime.program
    token_wise = {"qkv", "attn_out"}
    assert token_wise == list_token_wise(program)
    assert set(table.errors) == {op.name for op in program.ops} | token_wise
    assert set(table.ops) == {*table.errors, "attention_core"}  # which takes what they leave of attention
    assert (table.contention.keys(), table.host.computes) == ({"compute", "comm"}, True)
    assert all(factor >= 1 for factor in table.contention.values())


def test_the_file_names_machine_model_ranks_and_versions(calibrated: tuple[Path, str, str]) -> None:
    import torch
    import vllm

    origin = load_costs(calibrated[0]).provenance
    model = json.loads((TINY / "config.json").read_text())
    assert (origin.kind, origin.source) == ("measured", REMEDY)
    assert abs((date.fromisoformat(origin.date) - date.today()).days) <= 1
    assert origin.machine["platform"] == "cpu"
    assert origin.machine["chip"]
    assert origin.machine["threads"] == str(torch.get_num_threads())
    assert (origin.machine["transport"], origin.machine["dispatch"]) == ("none", "all_gather")
    assert origin.model["architecture"] == "DeepseekV3ForCausalLM"
    assert origin.model["dtype"] == "float32"
    for shape in ("hidden_size", "num_hidden_layers", "n_routed_experts", "moe_intermediate_size"):
        assert origin.model[shape] == str(model[shape])
    assert origin.parallel == {"tensor": 1, "data": 1, "experts": 0, "hosts": 1}
    assert origin.versions.keys() == {"dbo-runtime", "torch", "vllm"}
    assert origin.versions["vllm"] == vllm.__version__


def test_the_report_says_how_far_costs_are_off_for_each_op_and_for_steps(
    calibrated: tuple[Path, dict[str, Any], str],
) -> None:
    path, report, digest = calibrated
    table = load_costs(path)
    head, judgement, *rows, longer, slower, last = str(Report(**report)).splitlines()
    assert re.fullmatch(rf"calibrated in \d+ s; costs {digest}", head)
    worst = max(report["step_errors"].values())
    assert judgement.startswith(f"half of the measured steps are within {worst:.1%} of what the costs predict")
    named = {" ".join(words): error for *words, error in map(str.split, rows)}
    assert named.keys() == {*table.errors, "unsplit step", "split step"}
    assert all(named[op] == f"{error:.1%}" for op, error in table.errors.items())
    assert f"take {table.split_error:.1%} longer than predicted" in longer
    assert re.fullmatch(r"slower while another lane runs, by a factor of: compute \d+\.\d\d, comm \d+\.\d\d", slower)
    assert last == f"measured up to {max(shape.total for shape in FEW_SHAPES)} tokens a step"


def test_a_report_reads_as_a_table() -> None:
    errors = {"unsplit": 0.05, "split": 1.0}
    report = Report(31.6, "0123", {"attention": 0.0613}, errors, 0.034, {"comm": 1.5}, largest=512, left_out=3)
    assert str(report).splitlines() == [
        "calibrated in 32 s; costs 0123",
        "half of the measured steps are within 100.0% of what the costs predict: too much to trust small gains; "
        "calibrate with nothing else running; median errors of the fit against the measured points:",
        "  attention              6.1%",
        "  unsplit step           5.0%",
        "  split step           100.0%",
        "relative to unsplit steps, split ones take 3.4% longer than predicted (upper quartile)",
        "slower while another lane runs, by a factor of: comm 1.50",
        "measured up to 512 tokens a step; 3 sizes of batches were left out for lack of time",
    ]


def test_without_a_path_costs_are_used_and_not_written(
    forward: SplitForward, log: Lines, found: Measurements, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(calibration, "measure", lambda *_: found)
    get_costs(forward).prepare(RuntimeConfig(calibrate=True))
    assert forward.runtime.planner is not None
    (figures,) = log.find("planning by costs")
    assert figures["source"] == "calibration"
    assert figures["digest"] == forward.runtime.planner.table.digest
    assert list(tmp_path.iterdir()) == []


def test_the_settings_ask_for_a_calibration_that_is_written(
    forward: SplitForward, log: Lines, found: Measurements, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "costs.json"
    path.write_text("an old file, which is not read")
    monkeypatch.setattr(calibration, "measure", lambda *_: found)
    get_costs(forward).prepare(RuntimeConfig(calibrate=True, costs=str(path)))
    assert forward.runtime.planner is not None
    assert load_costs(path) == forward.runtime.planner.table


def test_costs_of_a_file_are_planned_by(
    calibrated: tuple[Path, str, str], one_rank: Engine, forward: SplitForward, log: Lines
) -> None:
    path, _, digest = calibrated
    get_costs(forward).prepare(RuntimeConfig(costs=str(path)))
    assert forward.runtime.planner is not None
    assert forward.runtime.planner.table == load_costs(path)
    ((level, event, figures),) = log.lines
    assert (level, event) == ("info", "planning by costs")
    assert (figures["source"], figures["kind"], figures["digest"]) == (str(path), "measured", digest)
    one_rank.generate(PROMPTS)
    assert forward.observer.last_step is not None
    assert forward.observer.last_step.expected is not None


def test_without_settings_there_are_no_costs(forward: SplitForward, log: Lines) -> None:
    get_costs(forward).prepare(RuntimeConfig())
    assert forward.runtime.planner is None
    assert log.lines == []


def test_costs_are_prepared_when_vllm_has_warmed_up_and_before_anything_is_split(
    one_rank: Engine, forward: SplitForward, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = SimpleNamespace(model_runner=one_rank.runner, compile_or_warm_up_model=lambda: "warm")
    worker_setup._wrap_warm_up(worker)
    monkeypatch.setattr(forward, "phase", Phase.STARTING)
    seen = []
    monkeypatch.setattr(get_costs(forward), "prepare", lambda config: seen.append((config, forward.phase)))
    assert worker.compile_or_warm_up_model() == "warm"
    assert seen == [(forward.runtime.config, Phase.STARTING)]
    assert forward.phase is Phase.SERVING


def edit(change: Callable[[Any], object]) -> Callable[[str], str]:
    """Return what changes the content of a cost file."""

    def rewrite(text: str) -> str:
        content = json.loads(text)
        change(content)
        return json.dumps(content)

    return rewrite


REFUSED: dict[str, tuple[Callable[[str], str], str]] = {
    "cut off": (lambda text: text[: len(text) // 2], "it is not JSON"),
    "empty": (lambda _: "", "it is not JSON"),
    "of another format": (edit(lambda content: content.update(format=7)), "format is 7"),
    "with a negative cost": (
        edit(lambda content: content["ops"]["moe"].update(fixed_us=-1)),
        "ops.moe.fixed_us is -1",
    ),
    "of another machine": (
        edit(lambda content: content["machine"].update(chip="A64FX")),
        "machine.chip is 'A64FX', here it is '",
    ),
    "of another transport": (
        edit(lambda content: content["machine"].update(transport="network")),
        "machine.transport is 'network', here it is 'none'",
    ),
    "of another model": (
        edit(lambda content: content["model"].update(hidden_size="7168")),
        "model.hidden_size is '7168', here it is '128'",
    ),
    "of another dtype": (
        edit(lambda content: content["model"].update(dtype="bfloat16")),
        "model.dtype is 'bfloat16', here it is 'float32'",
    ),
    "of more ranks": (
        edit(lambda content: content["parallel"].update(tensor=16)),
        "parallel.tensor is 16, here it is 1",
    ),
    "of another program": (
        edit(lambda content: content["program"]["runs"][1].update(repeat=58)),
        "it belongs to another program than the adapter records now",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_file_that_does_not_fit_is_refused_by_name_and_serving_goes_on_without(
    case: str,
    calibrated: tuple[Path, str, str],
    one_rank: Engine,
    forward: SplitForward,
    log: Lines,
    tmp_path: Path,
) -> None:
    rewrite, words = REFUSED[case]
    path = tmp_path / "costs.json"
    path.write_text(rewrite(calibrated[0].read_text()))
    with pytest.raises(ConfigError) as raised:
        get_costs(forward).load(str(path))
    for part in (f"cost file {path}: ", words, REMEDY):
        assert part in str(raised.value)
    assert_serves_on_without_costs(RuntimeConfig(costs=str(path)), str(raised.value), one_rank, forward, log)


def assert_serves_on_without_costs(
    config: RuntimeConfig, reason: str, engine: Engine, forward: SplitForward, log: Lines
) -> None:
    """Assert that these settings give one warning, and that steps are then split by the thresholds."""
    get_costs(forward).prepare(config)
    warning = "no costs to plan with; DBO_MODE=auto goes by the thresholds"
    assert log.lines == [("warning", warning, {"reason": reason})]
    assert forward.runtime.planner is None
    engine.generate(PROMPTS)
    assert forward.observer.last_step is not None
    assert (forward.observer.last_step.mode, forward.observer.last_step.expected) == ("split", None)


def test_a_file_that_is_not_there_is_refused(
    one_rank: Engine, forward: SplitForward, log: Lines, tmp_path: Path
) -> None:
    path = tmp_path / "absent.json"
    with pytest.raises(ConfigError, match=rf"cost file {path} cannot be read.*{REMEDY}") as raised:
        get_costs(forward).load(str(path))
    assert_serves_on_without_costs(RuntimeConfig(costs=str(path)), str(raised.value), one_rank, forward, log)


def test_a_file_of_other_versions_is_used_with_a_warning(
    calibrated: tuple[Path, str, str], forward: SplitForward, log: Lines, tmp_path: Path
) -> None:
    path = tmp_path / "costs.json"
    path.write_text(edit(lambda content: content["versions"].update(vllm="0.29.1"))(calibrated[0].read_text()))
    get_costs(forward).prepare(RuntimeConfig(costs=str(path)))
    assert forward.runtime.planner is not None
    (first, second) = log.lines
    assert first[:2] == ("warning", "costs were measured with other versions")
    assert first[2]["then"]["vllm"] == "0.29.1"
    assert first[2]["now"]["vllm"] != "0.29.1"
    assert second[:2] == ("info", "planning by costs")


def refuse_to_measure(*_: Any) -> Measurements:
    raise DeclineError("the dummy batches of vLLM's second model runner are not known")


@pytest.mark.parametrize(
    ("measure", "words"),
    [
        (refuse_to_measure, "the dummy batches of vLLM's second model runner are not known"),
        (lambda *_: Measurements(), "no op was measured"),
        (lambda *_: Measurements(left_out=[Shape(1, 8)]), "sizes. 45 s were too short for 1 more"),
    ],
    ids=["cannot be measured", "nothing was measured", "no time"],
)
def test_where_calibration_fails_serving_goes_on_without(
    measure: Any,
    words: str,
    one_rank: Engine,
    forward: SplitForward,
    log: Lines,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(calibration, "measure", measure)
    path = tmp_path / "costs.json"
    with pytest.raises((DeclineError, ConfigError), match=words) as raised:
        get_costs(forward).calibrate(str(path))
    assert not path.exists()
    config = RuntimeConfig(calibrate=True, costs=str(path))
    assert_serves_on_without_costs(config, str(raised.value), one_rank, forward, log)


def test_whatever_a_dummy_batch_fails_with_serving_goes_on_without(
    one_rank: Engine, forward: SplitForward, log: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_out_of_memory(*_: Any) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(measurement, "run_dummy", run_out_of_memory)
    assert_serves_on_without_costs(RuntimeConfig(calibrate=True), "MemoryError('no room')", one_rank, forward, log)


def test_whatever_a_file_is_read_with_all_ranks_hear_of_it(
    one_rank: Engine, forward: SplitForward, log: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cost_source, "load_costs", lambda _: 1 / 0)
    reason = "cost file costs.json cannot be used: ZeroDivisionError('division by zero')"
    assert_serves_on_without_costs(RuntimeConfig(costs="costs.json"), reason, one_rank, forward, log)


def test_whatever_the_fit_fails_with_all_ranks_hear_of_it_and_serving_goes_on_without(
    one_rank: Engine, forward: SplitForward, log: Lines, found: Measurements, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "measure", lambda *_: found)
    monkeypatch.setattr(calibration, "fit_steps", lambda *_: 1 / 0)
    reason = "the costs cannot be fitted: ZeroDivisionError('division by zero')"
    assert_serves_on_without_costs(RuntimeConfig(calibrate=True), reason, one_rank, forward, log)


def test_where_the_file_cannot_be_written_the_costs_are_used_all_the_same(
    forward: SplitForward, log: Lines, found: Measurements, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(calibration, "measure", lambda *_: found)
    path = str(tmp_path / "absent" / "costs.json")
    report = get_costs(forward).calibrate(path)
    assert forward.runtime.planner is not None
    assert forward.runtime.planner.table.digest == report["digest"]
    (told,) = log.find("the costs are in use, but not saved")
    assert f"cost file {path} cannot be written" in told["reason"]


def test_costs_that_are_refused_leave_those_in_use(forward: SplitForward, log: Lines, tmp_path: Path) -> None:
    planner = forward.runtime.planner = make_planner(forward.runtime.program)
    with pytest.raises(ConfigError):
        get_costs(forward).load(str(tmp_path / "absent.json"))
    assert forward.runtime.planner is planner


@pytest.mark.slow
def test_ranks_calibrate_to_the_same_costs(two_ranks: Engine, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    try:
        (report, digest), other = two_ranks.llm.collective_rpc(calibrate_few, args=(str(path),))
    finally:
        two_ranks.llm.collective_rpc(forget_costs)
    table = load_costs(path)
    assert digest == other[1] == table.digest
    assert digest == report["digest"]
    assert table.provenance.parallel["tensor"] == 2
    assert table.provenance.machine["transport"] == find_transport()

    write = edit(lambda content: content["host"].update(split_us=content["host"]["split_us"] + 1))
    (tmp_path / "other.json").write_text(write(path.read_text()))
    (tmp_path / "corrupt.json").write_text("{")
    same, differing, corrupt, missing = (
        two_ranks.llm.collective_rpc(load_on_rank, args=((str(path), str(tmp_path / name)),))
        for name in ("costs.json", "other.json", "corrupt.json", "missing.json")
    )
    assert same == [digest, digest]
    assert differing[0] == differing[1]
    assert re.search(rf"differs between ranks; copy one to all hosts\. rank 0: costs {digest}; rank 1: ", differing[0])
    assert corrupt[0] == corrupt[1]
    assert re.search(r"corrupt\.json: it is not JSON", corrupt[0])
    assert missing[0] == missing[1]
    assert re.search(r"missing\.json cannot be read", missing[0])


@pytest.mark.slow
def test_ranks_prepare_the_same_orders_or_do_not_plan(two_ranks: Engine, tmp_path: Path) -> None:
    """vLLM's default of `max_num_seqs` is another one on a node without a server."""
    path = tmp_path / "costs.json"
    try:
        two_ranks.llm.collective_rpc(calibrate_few, args=(str(path),))
    finally:
        two_ranks.llm.collective_rpc(forget_costs)
    shapes, digests = zip(*two_ranks.llm.collective_rpc(load_with_own_limits, args=(str(path),)), strict=True)
    assert shapes[0] == shapes[1]
    assert digests[0] == digests[1] != ""
    first, second = two_ranks.llm.collective_rpc(load_with_own_digest, args=(str(path),))
    assert first == second == "ranks prepared different issue orders. rank 0: orders of 0; rank 1: orders of 1"


def load_with_own_limits(worker: Any, path: str) -> tuple[list[Batch], str]:
    """Load a file on a rank whose scheduler has limits of its own; return the steps it prepares, and their digest."""
    forward = worker.model_runner.get_model().forward
    costs = get_costs(forward)
    own = replace(costs._limits, requests=costs._limits.requests * (1 + costs._group.rank_in_group))
    try:
        with mock.patch.object(costs, "_limits", own):
            costs.load(path)
        return forward.runtime.planner._shapes, forward.runtime.planner.digest
    finally:
        forward.runtime.planner = None


def load_with_own_digest(worker: Any, path: str) -> str:
    """Load a file on a rank that prepares other orders than the other one; return why it does not plan."""
    forward = worker.model_runner.get_model().forward
    costs = get_costs(forward)
    own = f"orders of {costs._group.rank_in_group}"
    with mock.patch.object(Planner, "digest", own), pytest.raises(ConfigError) as raised:
        costs.load(path)
    assert forward.runtime.planner is None
    return str(raised.value)


def load_on_rank(worker: Any, paths: tuple[str, str]) -> str:
    """Load a file of its own on each of two ranks; return the digest, or why the rank has none."""
    forward = worker.model_runner.get_model().forward
    try:
        get_costs(forward).load(paths[get_costs(forward)._group.rank_in_group])
        digest: str = forward.runtime.planner.table.digest
    except ConfigError as error:
        assert forward.runtime.planner is None
        return re.sub(r"^\S+ differs", "differs", str(error))
    finally:
        forward.runtime.planner = None
    return digest
