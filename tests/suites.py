"""Suites that need an environment of their own: each is reported where it is left out, and fails where it is required.

`NPU_TESTS=required` requires them, as `make test-npu NPU=required` and `make test-ascend ASCEND=required` do.
"""

from __future__ import annotations

import os

import pytest

VARIABLE = "NPU_TESTS"


def is_required() -> bool:
    """Return whether tests on the NPU must run here."""
    return os.environ.get(VARIABLE) == "required"


def fail_if_required(session: pytest.Session, reason: str | None) -> None:
    """Fail the session if tests were left out for *reason*, but are required."""
    if reason is not None and is_required():
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def report_left_out(reporter: pytest.TerminalReporter, suite: str, reason: str | None) -> None:
    """Write why a suite was left out, if it was, and whether that is a failure."""
    if reason is not None:
        verdict = "FAILED, it is required here: " if is_required() else ""
        reporter.write_line(f"{suite}: {verdict}left out, because {reason}")
