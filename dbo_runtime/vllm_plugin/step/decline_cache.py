"""Decline further steps of about the same size without reading their batches.

Reading a batch of 64 requests takes longer than everything else that this package adds to an unsplit step
(`bench_declined.py`), and decode steps are many, short and alike. A declined step is always correct. At worst, steps of
a size are split `MAX_REPEATS` steps too late.
"""

from __future__ import annotations

from dataclasses import dataclass

from dbo_runtime.bounded import BoundedDict
from dbo_runtime.config import RuntimeConfig
from dbo_runtime.decline import Decline
from dbo_runtime.planner.online.planner import Planner
from dbo_runtime.vllm_plugin.context.batch_size import BatchSize

MAX_REPEATS = 63
"""Number of steps of a size that repeat its decline. After them, the batch of the next step is read."""

MAX_SIZES = 64
"""Number of sizes that are kept."""

_SIGNIFICANT_BITS = 4  # numbers with the same leading four bits differ by less than an eighth

Key = tuple[int, int, int]


class DeclineCache:
    """The last decline of each size of batches, which is repeated for further steps of that size.

    Two sizes count as the same if their longest queries are equal, and their tokens and requests differ by less than an
    eighth. Contexts do not count, because they grow from step to step. All ranks that decide a step repeat the same
    declines.
    """

    def __init__(self) -> None:
        self._config: RuntimeConfig | None = None
        self._planner: Planner | None = None
        self._declines: BoundedDict[Key, _Repeated] = BoundedDict(MAX_SIZES)

    @property
    def size_and_capacity(self) -> tuple[int, int]:
        """Number of sizes that are kept, and the most that may be kept."""
        return len(self._declines), self._declines.max_size

    def find(self, size: BatchSize, config: RuntimeConfig, planner: Planner | None) -> Decline | None:
        """Return the decline to repeat for a batch of this size; None if the batch has to be read.

        If settings or costs have been replaced, it forgets all declines.
        """
        if config is not self._config or planner is not self._planner:
            self._config, self._planner = config, planner
            self._declines.clear()
        found = self._declines.get(_round(size))
        if found is None or found.left == 0:
            return None
        found.left -= 1
        return found.decline

    def keep(self, decline: Decline, size: BatchSize) -> None:
        """Keep the decline of a batch that was read because `find` had found none."""
        self._declines[_round(size)] = _Repeated(decline)


@dataclass(slots=True)
class _Repeated:
    """A decline, and the number of further steps that repeat it."""

    decline: Decline
    left: int = MAX_REPEATS


def _round(size: BatchSize) -> Key:
    """Return the key of a size. Two sizes with the same key count as the same."""
    return size.max_query_len, _truncate(size.tokens), _truncate(size.requests)


def _truncate(number: int) -> int:
    """Return *number* with all but its leading bits set to 0."""
    shift = number.bit_length() - _SIGNIFICANT_BITS
    return number >> shift << shift if shift > 0 else number
