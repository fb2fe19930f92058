"""Reasons why a model, an encoder or a step is not split: one type for all of them, at load time and in steps."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from dbo_runtime.errors import DboError


@dataclass(frozen=True, slots=True)
class Decline:
    """A reason against splitting.

    Attributes:
        reason: fixed phrase that declines are counted by.
        detail: figures of this case.
        expected: predicted seconds of the unsplit step; None without a prediction.
        trial_class: class of the step, if its time is compared with that of split ones; see `AbTrials`.
        only_micro: whether it is a reason against micro-batches only. Nano-batches do not cut attention.
    """

    reason: str
    detail: str = ""
    expected: float | None = None
    trial_class: Hashable | None = None
    only_micro: bool = False

    def __str__(self) -> str:
        return f"{self.reason} ({self.detail})" if self.detail else self.reason


@dataclass(frozen=True, slots=True)
class LocalDecline:
    """A reason against splitting that other ranks may not see. It is no `Decline`: a rank must not act on it alone.

    Data parallel ranks vote on it (`Agreement.agree`). The result of the vote is a `Decline`.
    """

    decline: Decline


class DeclineError(DboError):
    """Raised while recording a program that cannot be split. `record_program` returns its `decline`."""

    def __init__(self, reason: str, detail: str = "") -> None:
        self.decline = Decline(reason, detail)
        super().__init__(str(self.decline))
