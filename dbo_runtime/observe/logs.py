"""The log: few lines, with figures as key=value pairs."""

from __future__ import annotations

import logging
import sys

import structlog
from structlog.typing import EventDict, FilteringBoundLogger, Processor, WrappedLogger


def open_log(quiet: bool = False) -> FilteringBoundLogger:
    """Return a structlog logger; a *quiet* one drops everything below errors.

    If the host program has configured structlog, its configuration is used. Otherwise lines go to standard error, as
    vLLM's do, and structlog's global configuration stays unchanged.
    """
    if structlog.is_configured():
        configured: FilteringBoundLogger = structlog.get_logger("dbo_runtime")
        return configured
    processors: list[Processor] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="%m-%d %H:%M:%S", utc=False),
        _format,
    ]
    level = structlog.make_filtering_bound_logger(logging.ERROR if quiet else logging.INFO)
    logger: FilteringBoundLogger = structlog.wrap_logger(
        structlog.PrintLogger(sys.stderr), processors=processors, wrapper_class=level
    )
    return logger


def _format(_: WrappedLogger, __: str, event: EventDict) -> str:
    head = f"{event.pop('level').upper()} {event.pop('timestamp')} [dbo_runtime] {event.pop('event')}"
    return "  ".join([head, *(f"{key}={value}" for key, value in event.items() if value is not None)])
