"""Settings of all tests, and the devices that several of them run on."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.register_assert_rewrite("tests.support")  # its comparisons tell what they compared, as those of tests do

from tests.support import profiles, session_report, suites  # noqa: E402 - pytest must be told before

# torch loads torch_npu by itself, where that is installed; the tests have CANN, or a stand-in, to load before.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
# A stream that a test holds must hold no other, neither by sharing a queue with it nor by a kernel that is loaded late.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
# Ranks share two cores. OpenMP reads it when torch is imported, and its threads spin while they wait.
os.environ.setdefault("OMP_NUM_THREADS", "1")

profiles.load()

from tests.support.devices import rigs  # noqa: E402 - torch must find the variable
from tests.support.engine_fixtures import (  # noqa: E402, F401 - tests find the fixtures here
    data_parallel,
    engines,
    expert_ranks,
    mark_engines,
    one_rank,
    two_ranks,
)
from tests.support.executors import EXECUTORS, Prepare, make_prepare  # noqa: E402


@pytest.fixture(params=rigs.find_present())
def rig(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> Iterator[Any]:
    """Each device there is, with what tests need besides it."""
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


@pytest.fixture(params=EXECUTORS)
def prepare(request: pytest.FixtureRequest) -> Prepare:
    """Either executor."""
    return make_prepare(request.param)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what starts an engine."""
    mark_engines(items)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail where the NPU's tests are required (`make test-npu NPU=required`) and are left out, or none has passed."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if is_worker(session.config) or not suites.is_required():
        return
    if suites.list_left_out(session.config) or not session_report.count_devices(reporter)["npu", "passed"]:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Write which suites were left out, what tests have noted, the count by device, and the slowest files."""
    if is_worker(terminalreporter.config):
        return
    suites.report_left_out(terminalreporter)
    session_report.write_notes(terminalreporter)
    session_report.write_devices(terminalreporter)
    session_report.write_slowest_files(terminalreporter)


def is_worker(config: pytest.Config) -> bool:
    """Return whether this process runs a part of the tests for pytest-xdist: who started it reports on all of them."""
    return hasattr(config, "workerinput")
