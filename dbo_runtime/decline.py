"""Why a model, an encoder or a step is not split: one type for all reasons, at load time and at a step."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from dbo_runtime.errors import DboError


@dataclass(frozen=True, slots=True)
class Decline:
    """A reason against splitting.

    Attributes:
        reason: a fixed phrase to count by.
        detail: the figures of this case.
        expected: predicted seconds of the unsplit step; None without a prediction.
        trial_class: class of the step, if its time is compared with that of split ones; see `AbTrials`.
    """

    reason: str
    detail: str = ""
    expected: float | None = None
    trial_class: Hashable | None = None

    def __str__(self) -> str:
        return f"{self.reason} ({self.detail})" if self.detail else self.reason


@dataclass(frozen=True, slots=True)
class LocalDecline:
    """A reason against splitting that only this rank may see. It is no `Decline`: a rank must not act on it alone.

    Data parallel ranks put it to the vote (`Agreement.agree`); what all of them make of it is a `Decline`.
    """

    decline: Decline


class DeclineError(DboError):
    """Raised while a program is recorded if the model cannot be split; `record_program` returns its `decline`."""

    def __init__(self, reason: str, detail: str = "") -> None:
        self.decline = Decline(reason, detail)
        super().__init__(str(self.decline))
