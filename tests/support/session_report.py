"""What a run of the tests writes at its end, besides what pytest writes itself."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

SLOWEST_FILES = 10
DURATIONS = "TEST_DURATIONS"  # names a file to which each run adds its tests, for `tools.shards` and `.ci/run`


def write_notes(reporter: pytest.TerminalReporter) -> None:
    """Write what tests that passed have noted with `record_property`."""
    for report in reporter.stats.get("passed", ()):
        for name, value in getattr(report, "user_properties", ()):
            if name != "device":
                reporter.write_line(f"{report.nodeid.rpartition('::')[2]}: {name}: {value}")


def write_devices(reporter: pytest.TerminalReporter) -> None:
    """Write how many tests of each device passed, failed and were skipped."""
    counts = count_devices(reporter)
    for device in dict.fromkeys(device for device, _ in counts):
        words = [f"{counts[device, outcome]} {outcome}" for outcome in ("passed", "failed", "skipped")]
        reporter.write_line(f"device {device}: {', '.join(words)}")


def count_devices(reporter: pytest.TerminalReporter) -> Counter[tuple[str, str]]:
    """Count tests by device and outcome."""
    return Counter(
        (value, outcome)
        for outcome in ("passed", "failed", "skipped")
        for report in reporter.stats.get(outcome, ())
        for name, value in getattr(report, "user_properties", ())
        if name == "device"
    )


def write_slowest_files(reporter: pytest.TerminalReporter) -> None:
    """Write the files that took longest, fixtures included; nothing where there are not more files than that.

    The seconds of each test go to the file that `TEST_DURATIONS` names, if it is set.
    """
    seconds: Counter[str] = Counter()
    for report in list_reports(reporter):
        seconds[report.nodeid.partition("::")[0]] += report.duration  # type: ignore[assignment] - a Counter of floats
    if DURATIONS in os.environ:
        add_durations(reporter, Path(os.environ[DURATIONS]))
    if len(seconds) > SLOWEST_FILES:
        reporter.section(f"slowest {SLOWEST_FILES} files")
        for file, took in seconds.most_common(SLOWEST_FILES):
            reporter.write_line(f"{took:7.1f} s  {file}")


def add_durations(reporter: pytest.TerminalReporter, path: Path) -> None:
    """Add a line for each test to a file: seconds, how many of its cases passed, and its name without parameters."""
    seconds: Counter[str] = Counter()
    for report in list_reports(reporter):
        seconds[report.nodeid.partition("[")[0]] += report.duration  # type: ignore[assignment] - a Counter of floats
    passed = Counter(report.nodeid.partition("[")[0] for report in reporter.stats.get("passed", ()))
    with path.open("a") as file:
        file.writelines(f"{took:.3f} {passed[name]} {name}\n" for name, took in seconds.items())


def list_reports(reporter: pytest.TerminalReporter) -> Iterator[pytest.TestReport]:
    """List the reports of all set-ups, calls and tear-downs."""
    for reports in reporter.stats.values():
        yield from (report for report in reports if isinstance(report, pytest.TestReport))
