"""The project's log: few lines, each once, with figures as key=value."""

from __future__ import annotations

import logging
import sys
from typing import Any

import structlog


def open_log(quiet: bool = False) -> Any:
    """Return a structlog logger; a *quiet* one drops what is less than an error.

    A host that has configured structlog keeps its configuration. Otherwise lines go to standard error, where vLLM's
    own go, without touching anybody's global configuration.
    """
    if structlog.is_configured():
        return structlog.get_logger("dbo_runtime")
    processors: list[Any] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="%m-%d %H:%M:%S", utc=False),
        _format,
    ]
    level = structlog.make_filtering_bound_logger(logging.ERROR if quiet else logging.INFO)
    return structlog.wrap_logger(structlog.PrintLogger(sys.stderr), processors=processors, wrapper_class=level)


def _format(_: Any, __: str, event: dict[str, Any]) -> str:
    head = f"{event.pop('level').upper()} {event.pop('timestamp')} [dbo_runtime] {event.pop('event')}"
    return "  ".join([head, *(f"{key}={value}" for key, value in event.items() if value is not None)])
