"""The errors of dbo_runtime. Each message says what went wrong, where, and what to do about it."""

from __future__ import annotations


class DboError(Exception):
    """Base of every error that dbo_runtime raises on purpose."""


class ConfigError(DboError):
    """A setting is unknown or has a value that is not allowed."""


class ProgramError(DboError):
    """An adapter, or the program it declared, breaks its contract."""


class ScheduleError(DboError):
    """A schedule would race, hang, or contradict its programs."""


class SanitizerError(DboError):
    """An op made an undeclared or unordered access, or was issued in a way that its declaration does not allow."""


class SplitError(DboError):
    """A batch cannot be split as requested, or a split step gave other results than an unsplit one."""


class TransferError(DboError):
    """A KV connector's layer hooks were called in an order that no step has."""


class DeviceError(DboError):
    """A device cannot do what a schedule needs, or was used incorrectly."""


class RankError(DboError):
    """An operation that ranks perform together failed on one of them."""


def add_context(error: BaseException, context: str) -> None:
    """Attach *context* to an error of any type without changing the type.

    Keep the original type, because vLLM and users catch it (out of memory, for example). This does the same as PEP
    678's `add_note`, which Python 3.10 lacks.
    """
    error.__notes__ = [*getattr(error, "__notes__", ()), context]  # type: ignore[attr-defined]  # new in 3.11


def get_context(error: BaseException) -> str:
    """Return the context attached to an error."""
    return "; ".join(getattr(error, "__notes__", ()))
