"""Plugins of pytest: to see which test executes which line of a module, and to choose tests by it."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest

from .mutations import Mutation

# Nothing is written to the folders of the tests, and asserts stay plain: what was different does not matter here.
OPTIONS = ("-q", "-x", "--assert=plain", "-p", "no:cacheprovider", "-p", "no:xdist")
LEFT_OUT = "vllm or slow or root"  # markers
TIMES_SLOWER = 10.0  # than on the module as it is; a test that takes longer hangs


class Baseline(NamedTuple):
    """What the tests did with the module as it is.

    Attributes:
        seconds: that each test took, by its id.
        lines: that each test executed of the module, by its id.
    """

    seconds: dict[str, float]
    lines: dict[str, list[int]]

    def choose(self, mutation: Mutation) -> list[str]:
        """Return the tests in the order that soon finds one to notice a mutation.

        Those that execute its statement come first, quick ones before slow ones. The others come after them: the import
        may execute it, or a process that a test starts, or a test whose result another one has kept.
        """
        first, last = mutation.lines
        reached = {test for test, lines in self.lines.items() if any(first <= line <= last for line in lines)}
        return sorted(self.seconds, key=lambda test: (test not in reached, self.seconds[test]))


class Watch:
    """Notes what each test takes, and which lines of a file it executes."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)
        self._test = ""
        self._seconds: dict[str, float] = {}
        self._lines: defaultdict[str, set[int]] = defaultdict(set)

    def get_baseline(self) -> Baseline:
        """Return what was noted."""
        return Baseline(self._seconds, {test: sorted(lines) for test, lines in self._lines.items()})

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        """Run a test under watch."""
        self._test, began = item.nodeid, time.perf_counter()
        threading.settrace(self._trace)
        sys.settrace(self._trace)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            threading.settrace(None)
            self._seconds[item.nodeid] = time.perf_counter() - began

    def _trace(self, frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        if frame.f_code.co_filename != self._path:
            return None
        self._lines[self._test].add(frame.f_lineno)
        return self._trace


class Choice:
    """Runs chosen tests in their order, and ends the process when one hangs."""

    def __init__(self, tests: Sequence[str], seconds: Mapping[str, float], slack: float) -> None:
        self._tests = tests
        self._seconds = seconds
        self._slack = slack
        self.failed: str | None = None

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keep the chosen tests."""
        found = {item.nodeid: item for item in items}
        items[:] = [found[test] for test in self._tests if test in found]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Give a test its time. The signal ends the process, whatever that is doing."""
        signal.setitimer(signal.ITIMER_REAL, self._slack + TIMES_SLOWER * self._seconds[nodeid])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note which test fails."""
        if report.failed:
            self.failed = report.nodeid
