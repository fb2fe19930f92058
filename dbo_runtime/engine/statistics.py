"""Counts of the steps that a runtime ran."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Statistics:
    """Counts of steps by mode. Those counted as *concurrent* ran whole, with ops that overlap: see `Mode`."""

    split: int = 0
    nano: int = 0
    concurrent: int = 0
    micro_batches: int = 0
    declined: Counter[str] = field(default_factory=Counter)

    def as_dict(self) -> dict[str, Any]:
        """Return the counts as plain data."""
        return {
            "split": self.split,
            "nano": self.nano,
            "concurrent": self.concurrent,
            "micro_batches": self.micro_batches,
            "declined": dict(self.declined),
        }
