"""Check that accesses to values are ordered, by vector clocks of what lanes really did, not of what a schedule says.

Two accesses to one thing conflict unless both only read it. The first access of a conflicting pair must be ordered
before the second by its lane or by a chain of records and waits (Lamport 1978; as in FastTrack, Flanagan and Freund
2009).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from enum import Enum
from typing import NamedTuple

Clock = dict[str, int]


class Kind(Enum):
    """An op's kind of access to a value."""

    WRITE = "writes"
    READ = "reads"
    OVERWRITE = "overwrites"
    FREE = "frees"


class Access(NamedTuple):
    """One access by op number *number* of its lane. *by* names the op."""

    kind: Kind
    by: str
    lane: str
    number: int


class Accesses:
    """All lanes' clocks in one run, and all accesses so far.

    Args:
        lanes: names of the lanes. The first one is the caller's, on which everything begins.
    """

    def __init__(self, lanes: tuple[str, ...]) -> None:
        self._first = lanes[0]
        self._clocks: dict[str, Clock] = {lane: {lane: 0} for lane in lanes}
        self._clocks[self._first][self._first] = 1
        self._accesses: dict[Hashable, list[Access]] = defaultdict(list)

    def has_begun(self, lane: str) -> bool:
        """Return whether a lane is ordered after the start of the run."""
        return self._clocks[lane].get(self._first, 0) > 0

    def issue(self, lane: str) -> None:
        """Count an op of a lane."""
        self._clocks[lane][lane] += 1

    def record(self, lane: str) -> Clock:
        """Return the clock of a lane at this point."""
        return dict(self._clocks[lane])

    def wait(self, lane: str, event: Clock) -> None:
        """Order a lane after the clock of an event."""
        clock = self._clocks[lane]
        for other, count in event.items():
            clock[other] = max(clock.get(other, 0), count)

    def add_input(self, key: Hashable) -> None:
        """Note a value that the caller wrote before the run."""
        self._accesses[key].append(Access(Kind.WRITE, "the caller", self._first, 1))

    def add(self, key: Hashable, kind: Kind, by: str, lane: str) -> None:
        """Note an access by the op that was just issued to a lane."""
        self._accesses[key].append(Access(kind, by, lane, self._clocks[lane][lane]))

    def list(self, key: Hashable) -> list[Access]:
        """Return all accesses to a thing, in issue order."""
        return self._accesses[key]

    def find_unordered(self, key: Hashable, kind: Kind, lane: str) -> Access | None:
        """Return an earlier access that conflicts with one of this kind and may still be running; None if none does."""
        clock = self._clocks[lane]
        return next(
            (
                access
                for access in self._accesses[key]
                if not (access.kind is kind is Kind.READ) and clock.get(access.lane, 0) < access.number
            ),
            None,
        )

    def find_open_lane(self) -> str | None:
        """Return a lane whose ops the first lane is not ordered after; None if there is none."""
        clock = self._clocks[self._first]
        return next((lane for lane, own in self._clocks.items() if clock.get(lane, 0) < own[lane]), None)
