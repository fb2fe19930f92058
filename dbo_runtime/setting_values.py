"""The kinds of values that settings take: how each is parsed, and how messages describe it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Generic, TypeVar

T = TypeVar("T")

MAX_DIGITS = 20
MAX_COUNT = 1 << 31  # largest count of anything; a larger one is a mistake
MAX_MICRO_BATCHES = 64
MAX_LEAD = 10_000  # overlap points, more than any model has


@dataclass(frozen=True, slots=True)
class Values(Generic[T]):
    """The values that a setting allows.

    Attributes:
        parse: parser that turns a text into the value; raises ValueError for a text that is not allowed.
        allowed: the allowed values in words.
    """

    parse: Callable[[str], T]
    allowed: str


class Check(IntEnum):
    """The checks that run during steps. Each level includes the levels below it.

    OFF: nothing.
    RESULTS: results of split steps, compared with unsplit ones; and decisions, compared across ranks.
    RACES: every value and every op; see `dbo_runtime.lab.sanitizer`.
    """

    OFF = 0
    RESULTS = 1
    RACES = 2

    def __str__(self) -> str:
        """Return the text that sets this level."""
        return "races" if self is Check.RACES else str(int(self))


def read_count(text: str) -> int | None:
    """Return the whole number in a text; None if it is none, or has more digits than any count."""
    return int(text) if text.isdecimal() and len(text) <= MAX_DIGITS else None


def allow_names(*names: str) -> Values[str]:
    """Allow only these names."""

    def parse(text: str) -> str:
        if text not in names:
            raise ValueError(text)
        return text

    return Values(parse, f"{', '.join(names[:-1])} or {names[-1]}")


def allow_count(minimum: int, maximum: int = MAX_COUNT) -> Values[int]:
    """Allow whole numbers from *minimum* to *maximum*."""

    def parse(text: str) -> int:
        number = read_count(text)
        if number is None or not minimum <= number <= maximum:
            raise ValueError(text)
        return number

    most = "" if maximum == MAX_COUNT else f", at most {maximum}"
    return Values(parse, f"a whole number, at least {minimum}{most}")


def _parse_switch(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError(text)
    return text == "1"


def _parse_check(text: str) -> Check:
    if text == "races":
        return Check.RACES
    return Check.RESULTS if _parse_switch(text) else Check.OFF


def _parse_cores(text: str) -> tuple[int, ...]:
    if not text:
        return ()
    cube, vector = map(allow_count(1).parse, text.split(":"))
    return cube, vector


def _parse_parts(text: str) -> int | None:
    return None if text == "auto" else allow_count(2, MAX_MICRO_BATCHES).parse(text)


def _parse_margin(text: str) -> float:
    margin = float(text)
    if not 0 <= margin < math.inf:
        raise ValueError(text)
    return margin


def _parse_names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",")) if text else ()
    if not all(name.isidentifier() for name in names):
        raise ValueError(text)
    return names


def _parse_policy(text: str) -> tuple[str, int]:
    """Split `staggered:LEAD` into name and lead. Other policies have lead 0."""
    name, colon, lead = text.partition(":")
    if name in ("sequential", "alternate", "optimal") and not colon:
        return name, 0
    if name == "staggered":
        return name, allow_count(0, MAX_LEAD).parse(lead if colon else "1")
    raise ValueError(text)


SWITCH = Values(_parse_switch, "0 or 1")
CHECK = Values(_parse_check, "0, 1 or races")
PATH = Values(str, "a path")
CORES = Values(_parse_cores, "CUBE:VECTOR, such as 8:16")
PARTS = Values(_parse_parts, f"auto, or {allow_count(2, MAX_MICRO_BATCHES).allowed}")
NAMES = Values(_parse_names, "names of classes, with commas between them")
MARGIN = Values(_parse_margin, "a number, at least 0")
POLICY = Values(_parse_policy, "optimal, sequential, alternate, staggered or staggered:LEAD")


def name_policy(name: str, lead: int) -> str:
    """Return the text that sets a policy, such as `staggered:1`."""
    return f"{name}:{lead}" if name == "staggered" else name
