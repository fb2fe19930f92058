"""What makes steps longer than planned: ranks that are slow now and then, and experts that get uneven loads."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from dbo_runtime.errors import ConfigError


class Disturbance(NamedTuple):
    """What happens in one step.

    Attributes:
        slowdown: by which factor the slowest rank is late; all wait for it.
        imbalance: where between even and the most uneven load experts are, from 0 to 1.
    """

    slowdown: float
    imbalance: float


@dataclass(frozen=True, slots=True)
class Disturbances:
    """How often, and how much.

    Attributes:
        chance: probability that a rank is slow in a step.
        slowdown: by which factor it is.

    Raises:
        ConfigError: if the chance is not from 0 to 1, or the factor below 1.
    """

    chance: float = 0.0
    slowdown: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.chance <= 1:
            raise ConfigError(f"stragglers: chance is {self.chance:g}; a probability is from 0 to 1.")
        if not 1 <= self.slowdown <= 100:
            raise ConfigError(f"stragglers: slowdown is {self.slowdown:g}; a factor is from 1 to 100.")

    def draw(self, ranks: int, seed: int) -> Iterator[Disturbance]:
        """Yield what happens in each step of *ranks* ranks: some rank is slow with 1 - (1 - chance) ** ranks.

        Imbalance is uniform between even load and the most uneven one.
        """
        draws = random.Random(seed)
        some = 1 - (1 - self.chance) ** ranks
        while True:
            is_slow, imbalance = draws.random() < some, draws.random()
            yield Disturbance(self.slowdown if is_slow else 1.0, imbalance)
