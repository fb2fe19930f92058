"""Serve commands that are given to the doctor: how they are read, and what it says of what vLLM makes of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from dbo_runtime.errors import ConfigError
from dbo_runtime.lab.doctor import serve_command
from dbo_runtime.lab.doctor.finding import Finding
from dbo_runtime.lab.doctor.serve_command import ServeCommand, check_serve_command, read_command
from tests.support.serve_facts import FACTS
from tests.support.surroundings import Surroundings

NOTHING = "no communication to hide (why)"
ALONE = {"tensor": 1, "pipeline": 1, "data": 1, "expert": 1}


def test_variables_before_the_command_are_those_of_its_server() -> None:
    words = ["DBO_MODE=always", "EMPTY=", "vllm", "serve", "model", "--kv-transfer-config", '{"a": 1}']
    expected = ServeCommand({"DBO_MODE": "always", "EMPTY": ""}, ("model", "--kv-transfer-config", '{"a": 1}'))
    assert read_command(words) == expected


@pytest.mark.parametrize(
    ("program", "options"),
    [
        ("vllm serve", "model --seed 1"),
        ("python -m vllm.entrypoints.openai.api_server", "--seed 1 --model model"),
        ("/usr/bin/python3.11 -m vllm.entrypoints.openai.api_server", "--model=model --seed 1"),
    ],
)
def test_a_server_is_started_by_either_program(program: str, options: str) -> None:
    assert read_command(["A=1", *program.split(), *options.split()]) == ({"A": "1"}, ("model", "--seed", "1"))


def test_a_server_without_a_model_keeps_its_arguments() -> None:
    words = ["python3", "-m", "vllm.entrypoints.openai.api_server", "--seed", "1", "--model"]
    assert read_command(words).arguments == ("--seed", "1", "--model")


@pytest.mark.parametrize(
    "words", [["vllm", "bench"], ["serve", "model"], ["A=1"], ["A=1", "vllm"], ["python", "-m", "vllm"]], ids=" ".join
)
def test_another_command_is_refused_with_how_to_give_one(words: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"is not a `vllm serve` command: dbo doctor -- \[NAME=VALUE"):
        read_command(words)


@pytest.mark.parametrize(
    ("sizes", "found"),
    [
        ({"tensor": 8}, "tensor parallel 8: all-reduces would overlap with computation"),
        (
            {"tensor": 2, "data": 4, "expert": 8},
            "tensor parallel 2, data parallel 4, expert parallel 8: all-reduces and dispatch and combine of experts "
            "would overlap with computation",
        ),
    ],
)
def test_what_would_overlap_is_named(sizes: dict[str, int], found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (finding,) = check({"parallel": {**ALONE, **sizes}, "declines": []}, monkeypatch)
    assert (finding.state, finding.found) == ("ok", f"SomeForCausalLM on npu, {found}")


@pytest.mark.parametrize("sizes", [{}, {"pipeline": 2}, {"data": 2}], ids=str)
def test_without_communication_in_layers_the_remedy_is_to_spread_them(
    sizes: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    (finding,) = check({"parallel": {**ALONE, **sizes}, "declines": [], "hides_nothing": NOTHING}, monkeypatch)
    assert (finding.state, f"every step would run unsplit: {NOTHING}" in finding.found) == ("fail", True)
    assert "--tensor-parallel-size" in finding.remedy


def test_splitting_without_communication_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    (finding,) = check({"parallel": ALONE, "declines": []}, monkeypatch)
    assert (finding.state, "there is no communication to hide" in finding.found) == ("warn", True)


def test_ranks_whose_communication_hides_nothing_are_told_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {"parallel": {**ALONE, "tensor": 2}, "declines": [], "transport": "shared memory", "hides_nothing": NOTHING}
    (finding,) = check(facts, monkeypatch)
    assert (finding.state, f"every step would run unsplit: {NOTHING}" in finding.found) == ("fail", True)
    assert "DBO_MODE=always" in finding.remedy


def test_where_the_launcher_places_ranks_the_doctor_says_what_it_cannot_know(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {"parallel": {**ALONE, "tensor": 2}, "declines": [], "transport": None}
    (finding,) = check(facts, monkeypatch)
    assert (finding.state, "if the launcher puts all ranks on one host" in finding.found) == ("ok", True)


def test_costs_of_another_layout_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {"parallel": {**ALONE, "tensor": 4}, "declines": [], "misfit": "tensor is 2, here it is 4"}
    first, second = check(facts, monkeypatch)
    assert (first.state, second.state, second.found) == ("ok", "warn", "tensor is 2, here it is 4")


def test_costs_by_which_nothing_will_be_split_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    told = [
        "With these costs no prefill up to 8192 tokens will be split: why.",
        "With these costs prefills from 512 ...",
    ]
    facts = {"parallel": {**ALONE, "tensor": 4}, "declines": [], "outlooks": [(False, told[0]), (True, told[1])]}
    _, *found = check(facts, monkeypatch)
    assert [(finding.state, finding.found) for finding in found] == [("warn", told[0]), ("info", told[1])]


def test_what_is_not_proven_is_split_and_its_first_steps_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {"parallel": {**ALONE, "tensor": 4}, "declines": [], "compared": ["model SomeForCausalLM"]}
    first, second = check(facts, monkeypatch)
    assert (first.state, second.state) == ("ok", "info")
    assert second.found.startswith("model SomeForCausalLM is not proven yet: compares its first steps")


def test_where_only_attention_cannot_be_cut_there_are_nano_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {"parallel": {**ALONE, "tensor": 4}, "declines": [], "no_micro_batches": ["it keeps states"]}
    first, second = check(facts, monkeypatch)
    assert (first.state, second.state) == ("ok", "info")
    assert second.found.startswith("steps are cut into nano-batches only")
    assert second.found.endswith(": it keeps states")


def test_a_package_that_is_missing_here_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    (finding,) = check({"error": "ModuleNotFoundError: No module named 'mooncake'", "missing": "mooncake"}, monkeypatch)
    assert (finding.state, finding.found) == ("fail", "not checked: mooncake is not installed here")


def test_a_vllm_that_does_not_answer_has_not_refused_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    (finding,) = check({"error": "no answer within 300 s", "is_silent": True}, monkeypatch)
    assert (finding.state, finding.found) == ("fail", "not checked: no answer within 300 s")
    assert finding.remedy.startswith("ask again when the machine is less busy")
    (finding,) = check({"error": "unrecognized arguments: --x"}, monkeypatch)
    assert finding.found == "vLLM does not accept it: unrecognized arguments: --x"


def test_each_thing_that_prevents_splitting_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    first, *others = check({"parallel": ALONE, "declines": ["one", "other: why"]}, monkeypatch)
    assert (first.state, first.found) == ("info", "SomeForCausalLM on npu, one rank: every step would run unsplit")
    assert [(finding.state, finding.found) for finding in others] == [("fail", "one"), ("fail", "other: why")]


def test_what_a_platforms_defaults_mean_is_told_at_last(monkeypatch: pytest.MonkeyPatch) -> None:
    *others, last = check({"parallel": ALONE, "declines": ["one"], "notes": ["graphs: ..."]}, monkeypatch)
    assert [finding.state for finding in others] == ["info", "fail"]
    assert (last.state, last.found) == ("info", "graphs: ...")


def check(facts: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch, *options: str) -> list[Finding]:
    """Return the findings where the process that imports vLLM reports these facts."""
    monkeypatch.setattr(serve_command, "run_probe", lambda subject, environ, *arguments: {**FACTS, **facts})
    return check_serve_command(ServeCommand({}, ("model", *options)), {})


def test_what_vllm_does_not_know_is_named_and_the_rest_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = [("--max-long-partial-prefills", ("0.23.0",)), ("pass_config.new", ())]
    first, second, layout = check(
        {"parallel": {**ALONE, "tensor": 8}, "declines": [], "unknown_arguments": unknown}, monkeypatch
    )
    assert first.found == (
        "vLLM 0.30.0 does not know --max-long-partial-prefills, and does not start with it; known to vLLM 0.23.0. "
        "The rest is checked without it"
    )
    assert "known to" not in second.found
    assert [each.state for each in (first, second, layout)] == ["fail", "fail", "ok"]


def test_experts_whose_kernels_are_not_known_get_no_all_clear(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {**ALONE, "data": 2, "expert": 2}
    (finding,) = check({"parallel": sizes, "declines": [], "unknown_experts": "fp8 weights"}, monkeypatch)
    assert finding.state == "warn"
    assert "would overlap" not in finding.found
    assert "is known when vLLM has chosen the kernels of the experts (fp8 weights)" in finding.found


def test_a_model_with_the_adapter_of_its_base_class_gets_no_all_clear(monkeypatch: pytest.MonkeyPatch) -> None:
    (finding,) = check({"is_derived": True}, monkeypatch)
    assert finding.state == "warn"
    assert "which parts it takes is known when it is loaded" in finding.found


def test_hazards_are_warnings_with_their_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    *_, last = check(
        {"parallel": {**ALONE, "tensor": 2}, "declines": [], "hazards": [["a deadlock", "unset it"]]}, monkeypatch
    )
    assert last == Finding("command", "warn", "a deadlock", "unset it")


def test_an_encoder_that_is_served_with_host_lengths_is_named_even_if_no_step_is_split(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layout, note = check(
        {"parallel": ALONE, "declines": [], "hides_nothing": NOTHING, "takes_host_lengths": True}, monkeypatch
    )
    assert (layout.state, note.state) == ("fail", "info")
    assert "takes its sequence lengths from the host" in note.found


@pytest.mark.parametrize(("platform", "is_told"), [("npu", True), ("cuda", False)])
def test_a_switch_that_vllm_ascend_drops_is_named(
    platform: str, is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = {"platform": platform, "parallel": {**ALONE, "tensor": 2}, "declines": []}
    found = check(facts, monkeypatch, "--enable-dbo")
    assert any("ignores --enable-dbo" in finding.found for finding in found) is is_told


def test_options_need_a_model(core: Surroundings) -> None:
    done = core.run("--options=--tensor-parallel-size 2")
    assert (done.returncode, done.stderr) == (
        2,
        "dbo_runtime doctor: --options are of a model: dbo doctor MODEL_DIR --options '...'\n",
    )


def test_a_command_is_checked_with_its_own_variables(serving: Surroundings) -> None:
    printed = serving.run("--", "DBO_MODE=off", "vllm", "serve", "model").stdout
    assert "DBO_MODE is off: every step runs unsplit" in printed
    assert "FAIL  command  " in printed  # this vLLM is a stub, without a command line


def test_a_list_of_plugins_before_the_command_that_leaves_us_out_is_found(serving: Surroundings) -> None:
    """The server itself cannot say so: no code of ours runs in it."""
    done = serving.run("--", "VLLM_PLUGINS=other", "vllm", "serve", "model")
    assert done.returncode == 1
    assert "FAIL  plugin " in done.stdout
    assert "VLLM_PLUGINS='other' excludes it" in done.stdout
