"""What doctor says of what a user sets and names: settings, cost files, trace folders, models."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dbo_runtime.config import RuntimeConfig
from dbo_runtime.lab.doctor.finding import Finding, is_ok
from dbo_runtime.lab.doctor.model import check_model
from dbo_runtime.lab.doctor.settings import check_costs, check_settings, check_switch, check_trace, split_settings
from dbo_runtime.lab.whatif.published_cases import get_case
from dbo_runtime.planner.costs.cost_file import save_costs
from tests.support.surroundings import Surroundings


def write_model(folder: Path, config: object) -> str:
    """Write the part of a model that doctor reads; return its folder."""
    folder.mkdir()
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return str(folder)


def examine_model(folder: str) -> Finding:
    (found,) = check_model(folder)
    return found


def test_settings_come_with_their_source_and_every_wrong_one_is_a_failure(serving: Surroundings) -> None:
    done = serving.run(DBO_MARGIN="lots", DBO_MODEE="auto", DBO_MODE="always")
    assert (done.returncode, done.stderr) == (1, "")
    said = " ".join(done.stdout.split())
    assert "FAIL settings DBO_MARGIN='lots' is not allowed; it takes a number, at least 0. -> correct or" in said
    assert "FAIL settings DBO_MODEE is not a setting of dbo_runtime; did you mean DBO_MODE? -> correct or" in said
    assert "overlap is turned on, mode always" in said
    assert "DBO_MODE always (environment)" in said
    assert "DBO_MICRO_BATCHES auto (default)" in said


def test_the_second_name_of_the_switch_is_shown_and_checked_against_the_first() -> None:
    config, problems = split_settings({"DBO_ENABLE": "1"})
    assert (config.enabled, problems) == (True, [])
    rows = dict(check_settings({"DBO_ENABLE": "1"}, problems)[-1].details)
    assert rows["VLLM_ASCEND_ENABLE_DBO"] == "1 (DBO_ENABLE in the environment)"
    _, problems = split_settings({"DBO_ENABLE": "1", "VLLM_ASCEND_ENABLE_DBO": "0"})
    assert [problem.partition(":")[0] for problem in problems] == [
        "VLLM_ASCEND_ENABLE_DBO=0 and DBO_ENABLE=1 contradict each other"
    ]


def test_what_has_nothing_to_do_with_settings_is_left_alone() -> None:
    config, problems = split_settings({"VLLM_USE_V1": "7", "DBO_MARGIN": "0.5"})
    assert (config.margin, problems) == (0.5, [])
    assert is_ok(check_settings({"DBO_MARGIN": "0.5"}, problems))


@pytest.mark.parametrize(
    ("config", "remedy"),
    [
        (RuntimeConfig(), "VLLM_ASCEND_ENABLE_DBO=1"),
        (RuntimeConfig(enabled=True, mode="off"), "DBO_MODE=auto"),
    ],
)
def test_overlap_that_is_turned_off_is_a_failure(config: RuntimeConfig, remedy: str) -> None:
    found = check_switch(config)
    assert found.state == "fail"
    assert remedy in found.remedy


def test_a_cost_file_that_was_measured_is_taken(tmp_path: Path) -> None:
    table = get_case("a3-layer-4894").table
    save_costs(replace(table, provenance=replace(table.provenance, kind="measured")), tmp_path / "costs.json")
    found = check_costs(RuntimeConfig(costs=str(tmp_path / "costs.json")))
    assert found.state == "ok"
    assert f"measured, {table.provenance.date}, digest" in found.found


def test_cost_files_of_a_pipelines_stages_are_found(tmp_path: Path) -> None:
    table = get_case("a3-layer-4894").table
    measured = replace(table, provenance=replace(table.provenance, kind="measured"))
    for stage in range(2):
        save_costs(measured, tmp_path / f"costs.pp{stage}.json")
    found = check_costs(RuntimeConfig(costs=str(tmp_path / "costs.json")))
    assert found.state == "ok"
    assert all(f"{tmp_path / f'costs.pp{stage}.json'}: measured, " in found.found for stage in range(2))
    save_costs(table, tmp_path / "costs.pp1.json")
    assert check_costs(RuntimeConfig(costs=str(tmp_path / "costs.json"))).state == "warn"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("absent.json", "cannot be read"),
        ("corrupt.json", "is not JSON"),
        ("modelled.json", "not of a machine that serves"),
        (".", "cannot be read"),
    ],
)
def test_a_cost_file_that_cannot_be_used_stops_nothing(name: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "corrupt.json").write_text("{")
    save_costs(get_case("a3-layer-4894").table, tmp_path / "modelled.json")
    found = check_costs(RuntimeConfig(costs=str(tmp_path / name)))
    assert found.state == "warn"
    assert said in found.found


@pytest.mark.parametrize(("name", "state"), [("new.json", "ok"), ("absent/new.json", "warn"), (".", "warn")])
def test_a_cost_file_that_is_yet_to_be_measured_need_not_be_there(name: str, state: str, tmp_path: Path) -> None:
    assert check_costs(RuntimeConfig(costs=str(tmp_path / name), calibrate=True)).state == state


@pytest.mark.parametrize(("name", "state"), [(".", "ok"), ("new/folder", "ok"), ("file", "fail"), ("file/new", "fail")])
def test_a_folder_for_traces_must_be_writable(name: str, state: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    config, _ = split_settings({"DBO_TRACE": str(tmp_path / name)})
    assert [found.state for found in check_trace(config)] == [state]


def test_where_no_traces_are_asked_for_no_folder_is_looked_at() -> None:
    assert check_trace(RuntimeConfig()) == []


def test_a_model_with_an_adapter_is_split(tmp_path: Path) -> None:
    found = examine_model(write_model(tmp_path / "model", {"architectures": ["DeepseekV3ForCausalLM"]}))
    assert found.state == "ok"
    assert "split by dbo_models.deepseek.DeepseekAdapter" in found.found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"architectures": ["GraniteForCausalLM"]}, "no adapter is registered for GraniteForCausalLM"),
        ({"architectures": []}, "names no architectures"),
        ({"architectures": "DeepseekV3ForCausalLM"}, "names no architectures"),
        ({}, "names no architectures"),
        ("[]", "holds no JSON object"),
        ("{", "cannot be read"),
    ],
)
def test_a_model_without_an_adapter_is_a_failure(config: object, said: str, tmp_path: Path) -> None:
    found = examine_model(write_model(tmp_path / "model", config))
    assert found.state == "fail"
    assert said.replace("FOLDER", str(tmp_path)) in found.found


def test_without_an_adapter_the_generic_front_end_will_do_if_it_has_greenlet(
    serving: Surroundings, tmp_path: Path
) -> None:
    granite = write_model(tmp_path / "model", {"architectures": ["GraniteForCausalLM"]})
    serving.variables["DBO_GENERIC"] = "1"
    found = serving.examine(granite)["model"]
    assert (found["state"], found["remedy"]) == ("fail", "pip install 'dbo-runtime[generic]', which DBO_GENERIC needs")
    serving.describe("greenlet", "3.5.6")
    found = serving.examine(granite)["model"]
    assert found["state"] == "ok"
    assert "DBO_GENERIC=1 splits its own forward at the all-reduces (experimental)" in found["found"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("absent", "is not a folder"),
        ("od", "; did you mean FOLDER/odd?"),
        (".", "has no config.json"),
        ("odd", "cannot be read"),
    ],
)
def test_a_folder_that_is_not_a_model_is_a_failure(name: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "odd" / "config.json").mkdir(parents=True)
    found = examine_model(str(tmp_path / name))
    assert found.state == "fail"
    assert said.replace("FOLDER", str(tmp_path)) in found.found


def test_of_several_architectures_all_are_looked_at(tmp_path: Path) -> None:
    names = ["DeepseekV3ForCausalLM", "TheirForCausalLM"]
    found = examine_model(write_model(tmp_path / "model", {"architectures": names}))
    assert found.state == "warn"
    assert "several architectures (DeepseekV3ForCausalLM, TheirForCausalLM)" in found.found


def test_quantization_is_reported(tmp_path: Path) -> None:
    config = {"architectures": ["DeepseekV3ForCausalLM"], "quantization_config": {"quant_method": "fp8"}}
    model, quantization = check_model(write_model(tmp_path / "model", config))
    assert (model.state, quantization.state) == ("ok", "warn")
    assert quantization.found.startswith("fp8; ")


def test_an_adapter_that_is_broken_is_a_failure(serving: Surroundings, tmp_path: Path) -> None:
    serving.describe("theirs", "1.0", "[dbo_runtime.adapters]\nTheirModel = theirs:Adapter\n")
    found = serving.examine(write_model(tmp_path / "model", {"architectures": ["TheirModel"]}))
    assert (found["status"], found["model"]["state"]) == (1, "fail")
    assert "adapter theirs:Adapter of TheirModel cannot be imported" in found["model"]["found"]


def test_a_cost_file_that_is_not_there_is_a_warning_with_its_path(tmp_path: Path) -> None:
    found = check_costs(RuntimeConfig(costs=str(tmp_path / "none.json")))
    assert found.state == "warn"
    assert str(tmp_path / "none.json") in found.found
    assert "auto` uses thresholds" in found.found
    assert "dbo calibrate" in found.remedy
