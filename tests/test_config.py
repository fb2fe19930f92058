from __future__ import annotations

from dataclasses import FrozenInstanceError, fields

import pytest

from dbo_runtime.config import RuntimeConfig, Setting, list_settings, read_environment
from dbo_runtime.errors import ConfigError
from dbo_runtime.setting_sources import is_enabled, make_switch, read_options, reread_environment
from dbo_runtime.setting_values import Check

GOOD = [
    ("VLLM_ASCEND_ENABLE_DBO", "1", "enabled", True),
    ("VLLM_ASCEND_ENABLE_DBO", "0", "enabled", False),
    ("DBO_MODE", "auto", "mode", "auto"),
    ("DBO_MODE", "always", "mode", "always"),
    ("DBO_MODE", "off", "mode", "off"),
    ("DBO_SPLIT", "nano", "split", "nano"),
    ("DBO_MICRO_BATCHES", "2", "micro_batches", 2),
    ("DBO_MICRO_BATCHES", "3", "micro_batches", 3),
    ("DBO_MICRO_BATCHES", "auto", "micro_batches", None),
    ("DBO_COSTS", "costs.json", "costs", "costs.json"),
    ("DBO_COSTS", "", "costs", ""),
    ("DBO_CALIBRATE", "1", "calibrate", True),
    ("DBO_MARGIN", "0", "margin", 0.0),
    ("DBO_MARGIN", "0.05", "margin", 0.05),
    ("DBO_PROBATION", "0", "probation", False),
    ("DBO_MIN_TOKENS", "1", "min_tokens", 1),
    ("DBO_MIN_TOKENS", " 512 ", "min_tokens", 512),
    ("DBO_MIN_PREFILL_TOKENS", "0", "min_prefill_tokens", 0),
    ("DBO_POLICY", "optimal", "policy", ("optimal", 0)),
    ("DBO_POLICY", "sequential", "policy", ("sequential", 0)),
    ("DBO_POLICY", "alternate", "policy", ("alternate", 0)),
    ("DBO_POLICY", "staggered", "policy", ("staggered", 1)),
    ("DBO_POLICY", "staggered:0", "policy", ("staggered", 0)),
    ("DBO_POLICY", "staggered:3", "policy", ("staggered", 3)),
    ("DBO_SIDE", "auto", "side", "auto"),
    ("DBO_SIDE", "on", "side", "on"),
    ("DBO_SIDE", "off", "side", "off"),
    ("DBO_SIDE_CORES", "8:16", "side_cores", (8, 16)),
    ("DBO_SIDE_CORES", "", "side_cores", ()),
    ("DBO_DISPATCH", "all_gather", "dispatch", "all_gather"),
    ("DBO_DISPATCH", "all_to_all", "dispatch", "all_to_all"),
    ("DBO_COMPILE", "1", "compile", True),
    ("DBO_KV_CONNECTORS", "Own", "kv_connectors", ("Own",)),
    ("DBO_KV_CONNECTORS", "Own, Other", "kv_connectors", ("Own", "Other")),
    ("DBO_KV_CONNECTORS", "", "kv_connectors", ()),
    ("DBO_GENERIC", "1", "generic", True),
    ("DBO_TRACE", "traces", "trace", "traces"),
    ("DBO_TRACE_STEPS", "1", "trace_steps", 1),
    ("DBO_RANGES", "auto", "ranges", "auto"),
    ("DBO_RANGES", "on", "ranges", "on"),
    ("DBO_RANGES", "off", "ranges", "off"),
    ("DBO_CHECK", "1", "check", Check.RESULTS),
    ("DBO_CHECK", "races", "check", Check.RACES),
]

BAD = [
    ("VLLM_ASCEND_ENABLE_DBO", "true", "0 or 1"),
    ("VLLM_ASCEND_ENABLE_DBO", "", "0 or 1"),
    ("DBO_MODE", "on", "auto, always or off"),
    ("DBO_MODE", "AUTO", "auto, always or off"),
    ("DBO_SPLIT", "both", "auto, micro or nano"),
    ("DBO_MICRO_BATCHES", "1", "auto, or a whole number, at least 2, at most 64"),
    ("DBO_MICRO_BATCHES", "two", "auto, or a whole number, at least 2, at most 64"),
    ("DBO_MICRO_BATCHES", "2.0", "auto, or a whole number, at least 2, at most 64"),
    ("DBO_CALIBRATE", "now", "0 or 1"),
    ("DBO_KV_CONNECTORS", "Own Other", "names of classes, with commas between them"),
    ("DBO_MARGIN", "-0.1", "a number, at least 0"),
    ("DBO_MARGIN", "2%", "a number, at least 0"),
    ("DBO_MARGIN", "nan", "a number, at least 0"),
    ("DBO_MARGIN", "inf", "a number, at least 0"),
    ("DBO_PROBATION", "no", "0 or 1"),
    ("DBO_MIN_TOKENS", "0", "a whole number, at least 1"),
    ("DBO_MIN_TOKENS", "-1", "a whole number, at least 1"),
    ("DBO_COMPILE", "yes", "0 or 1"),
    ("DBO_GENERIC", "yes", "0 or 1"),
    ("DBO_TRACE_STEPS", "0", "a whole number, at least 1"),
    ("DBO_MIN_PREFILL_TOKENS", "-1", "a whole number, at least 0"),
    ("DBO_MIN_PREFILL_TOKENS", "", "a whole number, at least 0"),
    ("DBO_POLICY", "optimal:1", "optimal, sequential, alternate, staggered or staggered:LEAD"),
    ("DBO_POLICY", "alternate:1", "optimal, sequential, alternate, staggered or staggered:LEAD"),
    ("DBO_POLICY", "alternate:", "optimal, sequential, alternate, staggered or staggered:LEAD"),
    ("DBO_POLICY", "staggered:", "optimal, sequential, alternate, staggered or staggered:LEAD"),
    ("DBO_POLICY", "staggered:-1", "optimal, sequential, alternate, staggered or staggered:LEAD"),
    ("DBO_POLICY", "staggered:one", "optimal, sequential, alternate, staggered or staggered:LEAD"),
    ("DBO_SIDE", "1", "auto, on or off"),
    ("DBO_RANGES", "1", "auto, on or off"),
    ("DBO_SIDE_CORES", "8", "CUBE:VECTOR, such as 8:16"),
    ("DBO_SIDE_CORES", "8:0", "CUBE:VECTOR, such as 8:16"),
    ("DBO_SIDE_CORES", "8:16:1", "CUBE:VECTOR, such as 8:16"),
    ("DBO_DISPATCH", "alltoall", "auto, all_gather or all_to_all"),
    ("DBO_CHECK", "yes", "0, 1 or races"),
]


@pytest.mark.parametrize(("variable", "text", "name", "value"), GOOD)
def test_a_variable_sets_its_field_and_no_other(variable: str, text: str, name: str, value: object) -> None:
    config = read_environment({variable: text})
    for setting in fields(RuntimeConfig):
        assert getattr(config, setting.name) == (value if setting.name == name else setting.default)


@pytest.mark.parametrize(("variable", "text", "allowed"), BAD)
def test_a_bad_value_is_refused_with_variable_value_and_what_is_allowed(variable: str, text: str, allowed: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read_environment({variable: text})
    assert str(raised.value).startswith(f"{variable}={text!r} is not allowed; it takes {allowed}.")


def test_every_variable_has_good_and_bad_values_above() -> None:
    variables = {setting.metadata["variable"] for setting in fields(RuntimeConfig)}
    assert {row[0] for row in GOOD} == variables
    assert {row[0] for row in BAD} == variables - {"DBO_COSTS", "DBO_TRACE"}  # of which every text may be a path


def test_a_misspelt_variable_is_refused_with_the_one_that_was_meant() -> None:
    with pytest.raises(ConfigError, match=r"DBO_MINTOKENS is not a setting.*did you mean DBO_MIN_TOKENS\?"):
        read_environment({"DBO_MINTOKENS": "100"})


def test_an_unlike_variable_is_refused_with_all_that_there_are() -> None:
    with pytest.raises(ConfigError, match=r"DBO_UNHEARD_OF is not a setting.*known are .*DBO_MODE.*DBO_POLICY"):
        read_environment({"DBO_UNHEARD_OF": "1"})


def test_other_programs_variables_are_left_alone() -> None:
    assert read_environment({"HOME": "/root", "VLLM_USE_V1": "1", "MY_DBO_MODE": "odd"}) == RuntimeConfig()


def test_overlap_is_off_by_default() -> None:
    assert not RuntimeConfig().enabled


def test_settings_cannot_be_changed_once_read() -> None:
    with pytest.raises(FrozenInstanceError):
        RuntimeConfig().mode = "off"  # type: ignore[misc]  # it is frozen


def test_the_table_of_settings_has_each_setting_with_a_default_that_is_allowed() -> None:
    settings = list_settings()
    assert [setting.variable for setting in settings] == [field.metadata["variable"] for field in fields(RuntimeConfig)]
    assert all(setting.meaning and setting.allowed for setting in settings)
    defaults = {setting.variable: "" if setting.default == "none" else setting.default for setting in settings}
    assert read_environment(defaults) == RuntimeConfig()


def test_a_running_server_takes_settings_of_steps_on_top_of_its_environment() -> None:
    environ = {"VLLM_ASCEND_ENABLE_DBO": "1", "DBO_MODE": "always", "DBO_DISPATCH": "all_to_all"}
    config = reread_environment(environ, {"DBO_MODE": "off", "DBO_MARGIN": "0.5"})
    assert config == RuntimeConfig(enabled=True, mode="off", margin=0.5, dispatch="all_to_all")
    assert reread_environment(environ, {}) == read_environment(environ)


@pytest.mark.parametrize("setting", [setting for setting in list_settings() if setting.read == "at start"])
def test_a_running_server_refuses_each_setting_that_is_read_at_start(setting: Setting) -> None:
    default = "" if setting.default == "none" else setting.default
    with pytest.raises(ConfigError, match=f"^{setting.variable}: read at start only"):
        reread_environment({}, {setting.variable: default, "DBO_MODE": "off"})


def test_a_refusal_names_all_settings_that_cannot_change() -> None:
    with pytest.raises(ConfigError, match=r"^DBO_COSTS, DBO_DISPATCH: read at start only"):
        reread_environment({}, {"DBO_DISPATCH": "all_to_all", "DBO_COSTS": "costs.json", "DBO_SIDE": "off"})


def test_a_running_server_refuses_what_it_would_not_start_with() -> None:
    with pytest.raises(ConfigError, match="DBO_MODE='on' is not allowed"):
        reread_environment({}, {"DBO_MODE": "on"})


@pytest.mark.parametrize("value", ["0", "1"])
def test_the_switch_has_a_second_name_that_names_no_chip(value: str) -> None:
    alone = {"DBO_ENABLE": value}
    assert is_enabled(alone) == (value == "1")
    assert read_environment(alone) == read_environment({"VLLM_ASCEND_ENABLE_DBO": value})
    assert read_environment({**alone, "VLLM_ASCEND_ENABLE_DBO": value}) == read_environment(alone)
    assert read_environment(make_switch(value == "1")) == read_environment(alone)


def test_two_names_of_the_switch_that_contradict_each_other_are_refused() -> None:
    both = {"VLLM_ASCEND_ENABLE_DBO": "1", "DBO_ENABLE": "0"}
    for read in (is_enabled, read_environment):
        with pytest.raises(ConfigError, match=r"^VLLM_ASCEND_ENABLE_DBO=1 and DBO_ENABLE=0 contradict each other"):
            read(both)


def test_a_bad_value_of_the_second_name_is_refused_under_that_name() -> None:
    with pytest.raises(ConfigError, match=r"^DBO_ENABLE='yes' is not allowed; it takes 0 or 1"):
        is_enabled({"DBO_ENABLE": "yes"})
    with pytest.raises(ConfigError, match=r"^DBO_ENABLE: read at start only"):
        reread_environment({}, {"DBO_ENABLE": "1"})


def test_settings_that_are_options_of_a_command_are_refused_by_the_name_of_the_option() -> None:
    assert read_options({"--micro-batches": "3", "--side": "off"}) == RuntimeConfig(micro_batches=3, side="off")
    with pytest.raises(ConfigError, match=r"^--policy='best' is not allowed; it takes optimal, sequential"):
        read_options({"--policy": "best"})


def test_where_nothing_is_predicted_auto_makes_two_parts() -> None:
    assert RuntimeConfig().parts == 2
    assert RuntimeConfig(micro_batches=3).parts == 3
