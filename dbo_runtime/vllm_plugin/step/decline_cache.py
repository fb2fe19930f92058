"""Decline further steps of about the same size without reading their batches.

To read a batch of 64 requests takes longer than all else that an unsplit step adds (`bench_declined.py`), and steps
that decode are many, short and alike. A declined step is always correct; at worst, steps of a size are split
`MAX_REPEATS` steps too late.
"""

from __future__ import annotations

from operator import is_not

from dbo_runtime.bounded import BoundedDict
from dbo_runtime.decline import Decline
from dbo_runtime.vllm_plugin.context.splitter import BatchSize

MAX_REPEATS = 63
"""Steps of a size that repeat its decline; the batch of the next one is read."""

MAX_SIZES = 64
"""Sizes that are remembered."""

_SIGNIFICANT_BITS = 4  # numbers that agree in these differ by less than an eighth

Key = tuple[int, int, int]


class DeclineCache:
    """The last decline of each size of batches, which holds for further steps of that size.

    Sizes are the same if their longest queries are, and their tokens and requests within an eighth. Contexts, which
    grow from step to step, do not count. All ranks that decide a step repeat the same declines.
    """

    def __init__(self) -> None:
        self._conditions: tuple[object, ...] = ()
        self._declines: BoundedDict[Key, tuple[Decline, int]] = BoundedDict(MAX_SIZES)  # and repeats so far

    @property
    def fill(self) -> tuple[int, int]:
        """How many sizes are remembered, and how many may be."""
        return len(self._declines), self._declines.max_size

    def find(self, size: BatchSize, *conditions: object) -> Decline | None:
        """Return the decline to repeat for a batch of this size, or None if it has to be read.

        *conditions* are what else a decline depends on, compared by identity: if they change, all are forgotten.
        """
        self._check(conditions)
        key = _round(size)
        decline, repeats = self._declines.get(key, (None, MAX_REPEATS))
        if decline is None or repeats >= MAX_REPEATS:
            return None
        self._declines[key] = decline, repeats + 1
        return decline

    def keep(self, decline: Decline, size: BatchSize, *conditions: object) -> None:
        """Keep the decline of a batch that was read."""
        self._check(conditions)
        self._declines[_round(size)] = decline, 0

    def _check(self, conditions: tuple[object, ...]) -> None:
        if len(conditions) != len(self._conditions) or any(map(is_not, conditions, self._conditions)):
            self._conditions = conditions
            self._declines.clear()


def _round(size: BatchSize) -> Key:
    """Return what two sizes have in common if they are taken as the same."""
    return size.max_query_len, _truncate(size.tokens), _truncate(size.requests)


def _truncate(number: int) -> int:
    """Return *number* with its first significant bits only."""
    shift = max(number.bit_length() - _SIGNIFICANT_BITS, 0)
    return number >> shift << shift
