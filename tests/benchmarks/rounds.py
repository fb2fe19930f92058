"""Ways to do the same, timed in turns, because two runs on a shared machine differ by more than most effects."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

Mode = TypeVar("Mode", bound=Hashable)


def time_in_turns(
    modes: Mapping[Mode, Callable[[], object]], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[Mode, list[float]]:
    """Return the seconds of each mode in each round, in which each runs once, in random order; a first one warms up."""
    seconds: dict[Mode, list[float]] = {name: [] for name in modes}
    names, chance = list(modes), random.Random(0)
    for _ in range(rounds + 1):
        chance.shuffle(names)
        for name in names:
            start = clock()
            modes[name]()
            seconds[name].append(clock() - start)
    return {name: each[1:] for name, each in seconds.items()}
