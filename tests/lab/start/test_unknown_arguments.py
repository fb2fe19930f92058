"""Arguments that the installed vLLM does not know are named, and the rest of the command is read without them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dbo_runtime.errors import ConfigError
from dbo_runtime.lab.start.unknown_arguments import UnknownArgumentsError, check_printed, check_raised

TINY = str(Path(__file__).parents[3] / "examples" / "tiny-deepseek")
PRINTED = """argument --compilation-config/-cc: 2 validation errors for CompilationConfig
foo
  Unexpected keyword argument [type=unexpected_keyword_argument, input_value=1, input_type=int]
    For further information visit https://errors.pydantic.dev/2.14/v/unexpected_keyword_argument
pass_config.bar
  Unexpected keyword argument [type=unexpected_keyword_argument, input_value=True, input_type=bool]"""


def read_refusal(printed: str, *arguments: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    with pytest.raises(UnknownArgumentsError) as caught:
        check_printed(printed, arguments)
    return caught.value.names, caught.value.without


@pytest.mark.parametrize(
    ("unrecognized", "arguments", "names", "without"),
    [
        ("--a 3", "m --a 3 --b", "--a", "m --b"),
        ("--a=3 --c", "m --a=3 --b 3 --c", "--a --c", "m --b 3"),
        ("--a x y", "--b x m --a x y", "--a", "--b x m"),
    ],
)
def test_unknown_options_are_left_out_with_their_values(
    unrecognized: str, arguments: str, names: str, without: str
) -> None:
    found = read_refusal(f"unrecognized arguments: {unrecognized}", *arguments.split())
    assert found == (tuple(names.split()), tuple(without.split()))


@pytest.mark.parametrize(
    ("words", "without"),
    [
        (("-cc", '{"foo": 1, "pass_config": {"bar": true}, "c": 2}'), ("-cc", '{"pass_config": {}, "c": 2}')),
        (('-cc={"foo": 1}', "--x"), ("-cc={}", "--x")),
        (("--compilation-config.foo", "1", "-cc.pass_config.bar=1", "--x"), ("--x",)),
        (("--compilation-config.pass-config.bar", "1", "{no JSON", "[1]"), ("{no JSON", "[1]")),
    ],
    ids=["JSON", "JSON after =", "dots", "dashes"],
)
def test_unknown_fields_are_left_out(words: tuple[str, ...], without: tuple[str, ...]) -> None:
    assert read_refusal(PRINTED, "m", *words) == (("foo", "pass_config.bar"), ("m", *without))


def test_an_error_of_pydantic_names_its_fields() -> None:
    problem = {"type": "unexpected_keyword_argument", "loc": ("foo",), "msg": "Unexpected keyword argument"}
    error: Any = SimpleNamespace(errors=lambda: [problem])
    with pytest.raises(UnknownArgumentsError, match="vLLM does not know foo"):
        check_raised(error, ["--speculative-config", '{"foo": 1}'])
    check_raised(error, ["--speculative-config", '{"bar": 1}'])  # from elsewhere: nothing could be left out
    check_raised(ValueError("foo"), ["--speculative-config", '{"foo": 1}'])


@pytest.mark.parametrize(
    "printed",
    [
        "argument --seed: invalid int value: 'a'",
        PRINTED.replace("foo\n  Unexpected keyword argument [type=un", "foo\n  Is [type="),
    ],
    ids=["value", "mixed"],
)
def test_other_refusals_are_not_of_unknown_arguments(printed: str) -> None:
    check_printed(printed, ["-cc", '{"foo": 1}'])


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["--compilation-config", '{"mode": 0, "foo": 1}'], ["foo"]),
        (["--compilation-config", '{"pass_config": {"bar": true}}'], ["pass_config.bar"]),
        (
            ["--nosuch", "3", "--speculative-config", '{"method": "ngram", "num_speculative_tokens": 2, "z": 1}'],
            ["--nosuch", "z"],
        ),
        (["-cc.foo=1", "--also"], ["foo", "--also"]),
    ],
    ids=["JSON", "nested", "both", "dots"],
)
def test_vllm_reads_the_command_without_them(words: list[str], names: list[str]) -> None:
    from dbo_runtime.lab.start.arguments import make_known_config

    config, unknown = make_known_config([TINY, *words, "--seed", "7"])
    assert (sorted(unknown), config.model_config.seed) == (sorted(names), 7)


@pytest.mark.vllm
def test_vllm_s_other_refusals_remain() -> None:
    from dbo_runtime.lab.start.arguments import make_known_config

    with pytest.raises(ConfigError, match="seed"):
        make_known_config([TINY, "--seed", "a", "--nosuch"])
