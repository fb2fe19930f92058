"""Docstring entries are noun phrases, and words that only this project used do not come back."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted(path for package in ("dbo_runtime", "models") for path in (ROOT / package).rglob("*.py"))

# An entry that begins with one of these is no noun phrase: "device: where they run".
BEGINNINGS = (
    "of|by|that|which|with|what|whose|who|for|to|in|on|from|as|at|it|they|those|this|these|"
    "how|where|when|why|if|after|before|between|under|within|without"
)
ENTRY = re.compile(rf"    [*\w]+(?:, [*\w]+)*: (?:{BEGINNINGS})\b")

# Words of docstrings, comments and messages -> what to write instead.
PRIVATE_WORDS = {
    r"python -m dbo_runtime (?!COMMAND)\w": "dbo COMMAND",
    r"\bmbs?\b": "micro-batch",
    r"\bstay\(": "may_move_to_side(",
    r"\bmost to chance\b": "exposes a missing `ordered=True`",
    r"\b[Ss]tatement of (?:each|the) rank": "text that must be equal on all ranks",
    r"\bof which is remembered\b": "remembered as",
    r"\bthat it is of\b": "that it belongs to",
    r"\bwhat is gone\b": "a freed value",
}
NAMES_OF_RANGES = ROOT / "dbo_runtime/observe/ranges.py"  # people search profiles for `mb 1`


def list_entries(path: Path) -> Iterator[str]:
    """Yield the first line of each entry of an argument or attribute."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            section = ""
            for line in (ast.get_docstring(node) or "").split("\n"):
                section = line if line[:1].strip() else section
                if section in ("Args:", "Attributes:") and line.startswith("    "):
                    yield line


@cache
def read_prose(path: Path) -> str:
    """Return the comments of a file, and its strings of several words: docstrings and messages."""
    text = path.read_text()
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = [token.string for token in tokens if token.type == tokenize.COMMENT]
    strings = (node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant))
    return "\n".join([*comments, *(text for text in strings if isinstance(text, str) and " " in text.strip())])


def test_entries_of_arguments_and_attributes_are_noun_phrases() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in FILES
        for line in list_entries(path)
        if ENTRY.match(line)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(("private", "instead"), PRIVATE_WORDS.items(), ids=PRIVATE_WORDS.values())
def test_private_words_do_not_come_back(private: str, instead: str) -> None:
    searched = (path for path in FILES if path != NAMES_OF_RANGES)
    found = [
        f"{path.relative_to(ROOT)}: {match[0]!r}; write {instead!r}"
        for path in searched
        for match in re.finditer(private, read_prose(path))
    ]
    assert not found, "\n".join(found)
