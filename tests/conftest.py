"""Settings of all tests, and the devices that several of them run on."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import settings

# torch loads torch_npu by itself, where that is installed; the tests have CANN, or a stand-in, to load before.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
# A stream that a test holds must hold no other, neither by sharing a queue with it nor by a kernel that is loaded late.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")

# CI draws the same examples each time, so that what it says is about the change; runs by hand go on searching.
settings.register_profile("dbo", deadline=None, print_blob=True, derandomize="CI" in os.environ)
settings.load_profile("dbo")

from tests.devices import rigs  # noqa: E402 - torch must find the variable


@pytest.fixture(params=rigs.find_present())
def rig(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> Iterator[Any]:
    """Each device there is, with what tests need beside it."""
    yield from use_rig(request.param, record_property)


@pytest.fixture(params=[name for name in rigs.find_present() if name in rigs.STREAMS])
def stream_rig(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> Iterator[Any]:
    """Each device with streams."""
    yield from use_rig(request.param, record_property)


def use_rig(name: str, record_property: Callable[[str, object], None]) -> Iterator[Any]:
    """Note the device for the count at the end, open it, and close it."""
    record_property("device", name)
    rig = rigs.open_rig(name)
    yield rig
    rig.close()


@pytest.fixture
def device(rig: Any) -> Any:
    """Each device there is."""
    return rig.device


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail where the NPU's tests are required (`make test-npu NPU=required`) and all of them were skipped."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("NPU_TESTS") == "required" and not count_devices(reporter)["npu", "passed"]:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def count_devices(terminalreporter: Any) -> Counter[tuple[str, str]]:
    """Count tests by device and outcome."""
    return Counter(
        (value, outcome)
        for outcome in ("passed", "failed", "skipped")
        for report in terminalreporter.stats.get(outcome, ())
        for name, value in getattr(report, "user_properties", ())
        if name == "device"
    )


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Count the tests of each device, and print what else tests have noted."""
    for report in terminalreporter.stats.get("passed", ()):
        for name, value in getattr(report, "user_properties", ()):
            if name != "device":
                terminalreporter.write_line(f"{report.nodeid.rpartition('::')[2]}: {name}: {value}")
    counts = count_devices(terminalreporter)
    for device in dict.fromkeys(device for device, _ in counts):
        words = [f"{counts[device, outcome]} {outcome}" for outcome in ("passed", "failed", "skipped")]
        terminalreporter.write_line(f"device {device}: {', '.join(words)}")
