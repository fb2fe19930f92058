"""Settings of all tests, and the devices that several of them run on."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings

# torch loads torch_npu by itself, where that is installed; the tests have CANN, or a stand-in, to load before.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

# CI draws the same examples each time, so that what it says is about the change; runs by hand go on searching.
settings.register_profile("dbo", deadline=None, print_blob=True, derandomize="CI" in os.environ)
settings.load_profile("dbo")

from tests.devices import rigs  # noqa: E402 - torch must find the variable


@pytest.fixture(params=rigs.find_present())
def rig(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Each device there is, with what tests need beside it."""
    rig = rigs.open_rig(request.param)
    yield rig
    rig.close()


@pytest.fixture
def device(rig: Any) -> Any:
    """Each device there is."""
    return rig.device


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Count the tests of each device, and print what tests have found out."""
    for report in terminalreporter.stats.get("passed", ()):
        for name, value in getattr(report, "user_properties", ()):
            terminalreporter.write_line(f"{report.nodeid.rpartition('::')[2]}: {name}: {value}")
    counts: Counter[tuple[str, str]] = Counter()
    for outcome in ("passed", "failed", "skipped"):
        for report in terminalreporter.stats.get(outcome, ()):
            words = re.split(r"[\[\]-]", getattr(report, "nodeid", ""))
            counts.update((name, outcome) for name in rigs.NAMES if name in words[1:])
    for name in rigs.NAMES:
        words = [f"{counts[name, outcome]} {outcome}" for outcome in ("passed", "failed", "skipped")]
        if any(counts[name, outcome] for outcome in ("passed", "failed", "skipped")):
            terminalreporter.write_line(f"device {name}: {', '.join(words)}")
