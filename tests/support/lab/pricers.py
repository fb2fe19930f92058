"""Step times that are known without a planner."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Linear:
    """A step takes `start`, and more for each token."""

    start: float = 1.0
    prefill: float = 0.0
    decode: float = 0.0
    uneven: float = 1.0

    def price(self, prefill_tokens: int, decodes: int) -> tuple[float, float]:
        even = self.start + self.prefill * prefill_tokens + self.decode * decodes
        return even, even * self.uneven
