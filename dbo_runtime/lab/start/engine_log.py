"""What vLLM and its processes print while a command runs: moved out of the way, and kept if vLLM fails."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from dbo_runtime.errors import DboError, DeviceError
from dbo_runtime.lab.start.start_failure import describe_failure

STDOUT, STDERR = 1, 2


@contextmanager
def divert_output(to: int = STDERR, sources: Sequence[int] = (STDOUT,)) -> Iterator[None]:
    """Redirect output of this process and its children, by file descriptors; by default standard output to error.

    vLLM logs to standard output, where a command prints its result.
    """
    _flush()
    kept = {source: os.dup(source) for source in sources}
    for source in sources:
        os.dup2(to, source)
    try:
        yield
    finally:
        _flush()
        for source, copy in kept.items():
            os.dup2(copy, source)
            os.close(copy)


@contextmanager
def keep_log(model: str, is_verbose: bool) -> Iterator[str]:
    """Move all output to a file, or to standard error if *is_verbose*; yield the phrase that says where it is.

    The file stays only after a DeviceError.

    Raises:
        DeviceError: vLLM failed. The message has vLLM's own, what helps if that is known, and the file's name.
    """
    if is_verbose:
        with _shorten_errors(model, None, "vLLM's log is above."), divert_output():
            yield "vLLM's log is above."
        return
    descriptor, name = tempfile.mkstemp(prefix="dbo-vllm-", suffix=".log")
    log, where = Path(name), f"vLLM's log: {name} (--verbose prints it)"
    sys.stderr.write(f"starting vLLM; its log goes to {name}\n")
    keeps = False
    try:
        with _shorten_errors(model, log, where), divert_output(descriptor, (STDOUT, STDERR)):
            yield where
    except DeviceError:  # its message names the log
        keeps = True
        raise
    finally:
        os.close(descriptor)
        if not keeps:
            log.unlink(missing_ok=True)


def save_log(text: str) -> Path:
    """Write a log to a new file that stays; return its path."""
    descriptor, name = tempfile.mkstemp(prefix="dbo-vllm-", suffix=".log")
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    return Path(name)


@contextmanager
def _shorten_errors(model: str, log: Path | None, where: str) -> Iterator[None]:
    try:
        yield
    except DboError:
        raise
    except Exception as error:
        text = "" if log is None else log.read_text(encoding="utf-8", errors="replace")
        raise DeviceError(f"{describe_failure(model, text, error)} {where}") from error


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
