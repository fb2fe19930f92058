"""The errors of dbo_runtime. Each says what went wrong, where, and what to do about it."""

from __future__ import annotations


class DboError(Exception):
    """Base of every error that dbo_runtime raises on purpose."""


class ConfigError(DboError):
    """A setting is unknown or has a value that is not allowed."""


class ProgramError(DboError):
    """An adapter, or the program that it declared, breaks the contract."""


class ScheduleError(DboError):
    """A schedule would race, hang, or differ from what its programs say."""


class SanitizerError(DboError):
    """An op, or what issued it, did at run time what it did not declare, or what is not ordered."""


class SplitError(DboError):
    """A batch cannot be split as asked, or a split step gave other results than an unsplit one."""


class TransferError(DboError):
    """The layer hooks of a KV connector were called in an order that no step has."""


class DeviceError(DboError):
    """A device cannot do what a schedule needs, or was used against its rules."""


class RankError(DboError):
    """Work that ranks do together failed on one of them."""


def add_context(error: BaseException, context: str) -> None:
    """Attach *context* to an error of any type without changing the type.

    The original type must survive: vLLM and users catch it (out of memory, for one). This is PEP 678's `add_note`,
    written out because Python 3.10, which lacks the method, is supported.
    """
    error.__notes__ = [*getattr(error, "__notes__", ()), context]  # type: ignore[attr-defined]  # new in 3.11


def get_context(error: BaseException) -> str:
    """Return what was attached to an error."""
    return "; ".join(getattr(error, "__notes__", ()))
