"""Arguments of `vllm serve` that the installed vLLM does not know, and the command without them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dbo_runtime.errors import ConfigError

_UNRECOGNIZED = "unrecognized arguments: "
_UNEXPECTED = "unexpected_keyword_argument"  # pydantic's type of the error
# As argparse prints pydantic's error: the name of a field on a line of its own, and below it what is wrong.
_PRINTED = re.compile(r"^(\S+)\n +[^\n]*\[type=(\w+),", re.MULTILINE)


class UnknownArgumentsError(ConfigError):
    """vLLM does not know some of a command's arguments.

    Attributes:
        names: options such as `--seed`, and fields such as `pass_config.fuse_norm`.
        without: the command's arguments without them.
    """

    def __init__(self, names: Sequence[str], without: Sequence[str]) -> None:
        super().__init__(f"vLLM does not know {', '.join(names)}. Correct it, or leave it out.")
        self.names, self.without = tuple(names), tuple(without)


def check_printed(printed: str, arguments: Sequence[str]) -> None:
    """Raise UnknownArgumentsError if that is what argparse has *printed*."""
    if printed.startswith(_UNRECOGNIZED):
        words = printed.removeprefix(_UNRECOGNIZED).split()
        names = [word.partition("=")[0] for word in words if word.startswith("-")]
        _refuse(names, arguments, list(_drop_words(arguments, words)))
    found = _PRINTED.findall(printed)
    if found and all(kind == _UNEXPECTED for _, kind in found):
        _refuse_fields([name for name, _ in found], arguments)


def check_raised(error: BaseException, arguments: Sequence[str]) -> None:
    """Raise UnknownArgumentsError if that is what vLLM has raised, as an *error* of pydantic's."""
    problems = error.errors() if hasattr(error, "errors") else []
    if problems and all(problem["type"] == _UNEXPECTED for problem in problems):
        _refuse_fields([".".join(map(str, problem["loc"])) for problem in problems], arguments)


def _refuse_fields(names: Sequence[str], arguments: Sequence[str]) -> None:
    """Raise UnknownArgumentsError for fields that are found in the arguments."""
    rest = list(arguments)
    for name in names:
        rest = list(_drop_field(rest, name))
    _refuse(names, arguments, rest)


def _refuse(names: Sequence[str], arguments: Sequence[str], rest: Sequence[str]) -> None:
    """Raise UnknownArgumentsError unless nothing could be left out, so that the caller would ask the same again."""
    if names and list(rest) != list(arguments):
        raise UnknownArgumentsError(names, rest)


def _drop_words(arguments: Sequence[str], unrecognized: Sequence[str]) -> Iterator[str]:
    """Yield the arguments without those unrecognized: options, and the values that follow them."""
    is_dropping = False
    for word in arguments:
        is_dropping = any(word.split()[:1] == [each] for each in unrecognized) and (word.startswith("-") or is_dropping)
        if not is_dropping:
            yield word


def _drop_field(arguments: Sequence[str], name: str) -> Iterator[str]:
    """Yield the arguments without a field: of an option in JSON, or after a dot (`--speculative-config.model`)."""
    is_value = False
    for word in arguments:
        option, sign, value = word.partition("=")
        if is_value:
            is_value = False
        elif option.startswith("-") and option.replace("-", "_").endswith(f".{name}"):
            is_value = not sign
        elif word.startswith("{"):
            yield _drop_key(word, name)
        elif option.startswith("-") and value.startswith("{"):
            yield f"{option}={_drop_key(value, name)}"
        else:
            yield word


def _drop_key(text: str, name: str) -> str:
    """Return a JSON object without one key, given by the names on its path; unchanged if it has no such key."""
    try:
        data = json.loads(text)
    except ValueError:
        return text
    *path, last = name.split(".")
    inner: Any = data
    for key in path:
        inner = inner.get(key) if isinstance(inner, Mapping) else None
    if not isinstance(inner, dict) or last not in inner:
        return text
    del inner[last]
    return json.dumps(data)
