"""Causes of steps longer than planned: ranks that are slow at times, and uneven loads of experts."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from dbo_runtime.errors import ConfigError


class Disturbance(NamedTuple):
    """The disturbance of one step.

    Attributes:
        slowdown: factor by which the slowest rank is late; all ranks wait for it.
        imbalance: position between even and most uneven load of experts, from 0 to 1.
    """

    slowdown: float
    imbalance: float


@dataclass(frozen=True, slots=True)
class Disturbances:
    """The frequency and size of disturbances.

    Attributes:
        chance: probability that a rank is slow in a step.
        slowdown: factor by which a slow rank is slower.

    Raises:
        ConfigError: the chance is not from 0 to 1, or the factor is below 1.
    """

    chance: float = 0.0
    slowdown: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.chance <= 1:
            raise ConfigError(f"stragglers: chance is {self.chance:g}; a probability is from 0 to 1.")
        if not 1 <= self.slowdown <= 100:
            raise ConfigError(f"stragglers: slowdown is {self.slowdown:g}; a factor is from 1 to 100.")

    def draw(self, ranks: int, seed: int) -> Iterator[Disturbance]:
        """Yield the disturbance of each step of *ranks* ranks.

        Some rank is slow with probability 1 - (1 - chance) ** ranks.

        The imbalance is uniform between even and most uneven load.
        """
        draws = random.Random(seed)
        some = 1 - (1 - self.chance) ** ranks
        while True:
            is_slow, imbalance = draws.random() < some, draws.random()
            yield Disturbance(self.slowdown if is_slow else 1.0, imbalance)
