"""The commands in shell blocks of a page in Markdown, with their options and what their block assigns before them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

FENCE = re.compile(r"\s*`{3,}(.*)")
SHELLS = ("shell", "bash", "sh", "console")
VARIABLE = re.compile(r"\$(?:\{(\w+)(?::?-([^}]*))?\}|(\w+))")
ARITHMETIC = re.compile(r"\$\(\([^()]*\)\)")
ASSIGNMENT = re.compile(r"(?:export\s+)?\w+=")
OPTION = re.compile(r"--?[A-Za-z]")


class Command(NamedTuple):
    """A command of a block.

    Attributes:
        line: line number of the start of its block.
        words: the command's words, as a shell has them but for variables.
        variables: values assigned before it, in the block and in the command itself.
    """

    line: int
    words: list[str]
    variables: dict[str, str]


class Block(NamedTuple):
    """A fenced block: where it starts, and its lines."""

    line: int
    lines: list[str]


def list_commands(text: str, start: re.Pattern[str]) -> Iterator[Command]:
    """Yield the commands of which a line matches *start*."""
    for block in _list_blocks(text):
        for at, line in enumerate(block.lines):
            if start.match(line):
                variables = _read_variables(block.lines[:at])
                words = _split(block, at)
                variables.update(_assign(_take_assignments(words), variables))
                yield Command(block.line, words, variables)


def read_options(words: Sequence[str], short: Mapping[str, str]) -> tuple[dict[str, str | None], list[str]]:
    """Return the options by their long name with hyphens, None for those without a value, and the other words."""
    options: dict[str, str | None] = {}
    others: list[str] = []
    name = ""
    for word in words:
        if OPTION.match(word):
            name, equals, value = word.partition("=")
            head, dot, key = short.get(name, name.removeprefix("--")).partition(".")
            name = f"{head.replace('_', '-')}{dot}{key}"
            options[name] = value if equals else None
            name = "" if equals else name
        elif name:
            options[name] = word
            name = ""
        else:
            others.append(word)
    return options, others


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Return *text* with the values of *variables*, or with defaults; variables without a value stay."""

    def replace(found: re.Match[str]) -> str:
        return variables.get(found[1] or found[3], found[2] or found[0])

    return VARIABLE.sub(replace, text)


def _list_blocks(text: str) -> Iterator[Block]:
    """Yield shell blocks. A fence with a language opens one, even where the block before was not closed."""
    block: Block | None = None
    for number, line in enumerate(text.splitlines(), 1):
        fence = FENCE.match(line)
        if fence is None:
            if block is not None:
                block.lines.append(line)
            continue
        if block is not None:
            yield block
        words = str(fence[1]).replace("{code-block}", "").split()
        block = Block(number, []) if words and words[0] in SHELLS else None
    if block is not None:
        yield block


def _split(block: Block, at: int) -> list[str]:
    """Return the words of the command that starts at a line."""
    text = ""
    gap = False
    for line in block.lines[at:]:
        quoted = _split_words(text) is None
        if not quoted and (not line.strip() or line.lstrip().startswith("#")):
            gap = True
            continue
        if text and not quoted and (not text.endswith("\\\n") or (gap and not OPTION.match(line.lstrip()))):
            break
        text += f"{line.rstrip()}\n"
        gap = False
    words = _split_words(ARITHMETIC.sub("0", text))
    if words is None:
        raise ValueError(f"line {block.line}: a quote is not closed in {text}")
    return words


def _split_words(text: str) -> list[str] | None:
    """Return the words of a command; None if it ends within quotes."""
    try:
        return shlex.split(text.replace("\\\n", "\n"))
    except ValueError:
        return None


def _read_variables(lines: Iterable[str]) -> dict[str, str]:
    variables: dict[str, str] = {}
    for line in lines:
        if not ASSIGNMENT.match(line.strip()):
            continue
        try:
            words = shlex.split(line.rstrip("\\ "), comments=True)
        except ValueError:  # a value of several lines
            continue
        variables.update(_assign(words, variables))
    return variables


def _take_assignments(words: Iterable[str]) -> Iterator[str]:
    """Yield the words before a command's name."""
    for word in words:
        if not ASSIGNMENT.match(word) and word not in ("exec", "nohup", "env"):
            return
        yield word


def _assign(words: Iterable[str], known: Mapping[str, str]) -> dict[str, str]:
    assigned = (word.split("=", 1) for word in words if ASSIGNMENT.match(word))
    return {name: expand(value, known) for name, value in assigned}
