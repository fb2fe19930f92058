"""Suites that need an environment of their own: each is reported where it is left out, and fails where it is required.

`NPU_TESTS=required` requires them, as `make test-npu NPU=required` and `make test-ascend ASCEND=required` do. What is
found here holds in every process of pytest-xdist, also in the one that collects no tests and reports on all.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass

import pytest

VARIABLE = "NPU_TESTS"


@dataclass(frozen=True)
class Suite:
    """A folder of tests, the packages that they need, and the make target that has an environment with these."""

    folder: str
    packages: tuple[str, ...]
    target: str

    def explain_left_out(self) -> str | None:
        """Return why nothing of the suite can run here, if it cannot."""
        if "ASCEND_HOME_PATH" in os.environ:
            return "CANN itself is installed here"
        missing = ", ".join(name for name in self.packages if importlib.util.find_spec(name) is None)
        return f"not installed here: {missing}; `make {self.target}` has an environment with it" if missing else None

    def is_selected(self, config: pytest.Config) -> bool:
        """Return whether the suite is among the tests that pytest was asked for."""
        folder = config.rootpath / self.folder
        asked = [(config.invocation_params.dir / words.partition("::")[0]).resolve() for words in config.args]
        return any(folder == path or folder in path.parents or path in folder.parents for path in asked)


ASCEND = Suite("tests/ascend", ("vllm_ascend", "torch_npu", "standin_ascend"), "test-ascend")
STANDIN = Suite("tests/standin/cann", ("torch", "torch_npu"), "test-npu")


def is_required() -> bool:
    """Return whether tests on the NPU must run here."""
    return os.environ.get(VARIABLE) == "required"


def list_left_out(config: pytest.Config) -> dict[str, str]:
    """Return the suites that pytest was asked for and that are left out, by folder, with the reason."""
    reasons = {suite.folder: suite.explain_left_out() for suite in (ASCEND, STANDIN) if suite.is_selected(config)}
    return {folder: reason for folder, reason in reasons.items() if reason is not None}


def report_left_out(reporter: pytest.TerminalReporter) -> None:
    """Write which suites were left out, why, and whether that is a failure."""
    verdict = "FAILED, it is required here: " if is_required() else ""
    for folder, reason in list_left_out(reporter.config).items():
        reporter.write_line(f"{folder}: {verdict}left out, because {reason}")
