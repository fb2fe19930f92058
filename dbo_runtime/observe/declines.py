"""Count and log declines: here and nowhere else, so that all of them read alike."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from dbo_runtime.decline import Decline

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger


def warn_declined(log: FilteringBoundLogger, what: str, decline: Decline, **facts: object) -> None:
    """Warn at load time that nothing of *what*, such as `every step`, is split."""
    log.warning(f"{what} runs unsplit", reason=decline.reason, detail=decline.detail or None, **facts)


def note_standing(log: FilteringBoundLogger, decline: Decline) -> None:
    """Log, while serving, that no further step is split."""
    log.info("every further step runs unsplit", reason=decline.reason, detail=decline.detail or None)


def count_declined(log: FilteringBoundLogger, counts: Counter[str], decline: Decline) -> None:
    """Count a step that is not split by its reason; log the first of each reason."""
    if not counts[decline.reason]:
        log.info("step not split", reason=decline.reason, detail=decline.detail or None)
    counts[decline.reason] += 1
