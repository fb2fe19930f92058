"""Counts and logs declines. All declines go through here, so that they read alike."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from dbo_runtime.decline import Decline

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger


def warn_declined(log: FilteringBoundLogger, what: str, decline: Decline, **facts: object) -> None:
    """Warn at load time that *what*, such as `every step`, is never split."""
    log.warning(f"{what} runs unsplit", reason=decline.reason, detail=decline.detail or None, **facts)


def note_standing(log: FilteringBoundLogger, decline: Decline) -> None:
    """Log, while serving, that no further step is split."""
    log.info("every further step runs unsplit", reason=decline.reason, detail=decline.detail or None)


def count_declined(log: FilteringBoundLogger, counts: Counter[str], decline: Decline) -> None:
    """Count an unsplit step by its reason; log the first decline for each reason."""
    if not counts[decline.reason]:
        log.info("step not split", reason=decline.reason, detail=decline.detail or None)
    counts[decline.reason] += 1
