"""Dictionaries that forget."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dbo_runtime.bounded import BoundedDict


@given(st.integers(1, 5), st.lists(st.tuples(st.integers(0, 9), st.integers())))
def test_it_keeps_those_that_were_inserted_last(size: int, entries: list[tuple[int, int]]) -> None:
    bounded: BoundedDict[int, int] = BoundedDict(size)
    kept: list[tuple[int, int]] = []
    for key, entry in entries:
        bounded[key] = entry
        if key in dict(kept):  # its age stays
            kept = [(each, entry if each == key else old) for each, old in kept]
        else:
            kept = [*kept, (key, entry)][-size:]
        assert list(bounded.items()) == kept


def test_reading_an_entry_does_not_keep_it() -> None:
    bounded: BoundedDict[str, int] = BoundedDict(2)
    bounded["first"], bounded["second"] = 1, 2
    assert bounded["first"] == bounded.get("first") == 1
    bounded["third"] = 3
    assert list(bounded) == ["second", "third"]


def test_what_was_removed_leaves_room() -> None:
    bounded: BoundedDict[str, int] = BoundedDict(2)
    bounded["first"], bounded["second"] = 1, 2
    assert bounded.pop("first") == 1
    bounded["third"] = 3
    assert list(bounded) == ["second", "third"]
