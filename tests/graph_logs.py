"""A log that keeps what graphs say."""

from __future__ import annotations

from typing import Any


class Log:
    """Keeps lines, as a structlog logger takes them."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def info(self, event: str, **figures: Any) -> None:
        self.lines.append({"event": event, **figures})

    @property
    def declines(self) -> list[dict[str, Any]]:
        """The lines that say why steps run eagerly."""
        return [line for line in self.lines if line["event"] == "step not replayed, runs eagerly"]
