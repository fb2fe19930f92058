"""A green run means that tests ran: what is left out fails where it is required, and so does a build that fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("torch_npu", "vllm_ascend", "standin_ascend")
SUITES = ("tests/ascend", "tests/standin/cann")
NOT_OURS = ("NPU_TESTS", "ASCEND_HOME_PATH", "TEST_DURATIONS")
COMPILER = """#!/bin/sh
if [ "$1" = --version ]; then echo build >> "$0.log"; echo a compiler that compiles nothing; exit; fi
echo "runtime.cpp:1: error: nothing compiles here" >&2
exit 1
"""


def run_pytest(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run some of the tests in a process of their own, with only these settings."""
    settings = {name: value for name, value in os.environ.items() if name not in NOT_OURS}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *words]
    return subprocess.run(
        command, cwd=ROOT, env={**settings, **variables}, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """Return a folder with a compiler that fails."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "g++").write_text(COMPILER)
    (folder / "g++").chmod(0o755)
    return folder


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """Return a folder with what is looked for to see whether the environment exists."""
    folder = tmp_path / "packages"
    for name in PACKAGES:
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").touch()
    (folder / "torch_npu-2.13.0.dist-info").mkdir()
    (folder / "torch_npu-2.13.0.dist-info" / "METADATA").write_text("Name: torch-npu\nVersion: 2.13.0\n")
    return folder


@pytest.mark.slow
def test_where_the_environment_exists_a_build_that_fails_fails_the_tests(programs: Path, packages: Path) -> None:
    tests = ("ascend/test_settings.py", "standin/cann/test_cann.py", "devices/test_contract.py")
    path = f"{programs}:{os.environ['PATH']}"
    words = [*(f"tests/{name}" for name in tests), "-k", "not test_contract or (npu and not missing)"]
    done = run_pytest(*words, PYTHONPATH=str(packages), PATH=path)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout
    summary = done.stdout.splitlines()
    for name in tests:
        assert [line for line in summary if line.startswith(("ERROR", "FAILED")) and name in line], name
    assert not [line for line in summary if line.startswith("SKIPPED")]
    assert "error: nothing compiles here" in done.stdout
    assert (programs / "g++.log").read_text().count("build") == len(tests), "a build that failed was repeated"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("required", "status", "verdict"),
    [
        pytest.param("auto", pytest.ExitCode.OK, "left out", marks=pytest.mark.slow),
        ("required", pytest.ExitCode.TESTS_FAILED, "FAILED, it is required here: left out"),
    ],
)
@pytest.mark.parametrize("processes", ["0", pytest.param("1", marks=pytest.mark.slow)])
def test_a_suite_that_is_left_out_is_reported_and_fails_where_it_is_required(
    required: str, status: pytest.ExitCode, verdict: str, processes: str, tmp_path: Path
) -> None:
    """A test that passes runs, too: a run in which no test runs at all fails anyway."""
    cann = {"ASCEND_HOME_PATH": str(tmp_path)}  # as on a machine that has CANN itself
    done = run_pytest(*SUITES, "tests/ir/test_render.py", "-n", processes, **cann, NPU_TESTS=required)
    assert done.returncode == status, done.stdout
    for suite in SUITES:
        assert f"{suite}: {verdict}, because CANN itself is installed here" in done.stdout


@pytest.mark.parametrize(("required", "status"), [("auto", 0), ("required", 2)])
def test_an_environment_that_cannot_be_made_is_a_failure_where_it_is_required(required: str, status: int) -> None:
    command = ["make", "test-ascend", f"ASCEND={required}", "PYTHON=false"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == status
    assert ("test-ascend: left out" in done.stdout) == (required == "auto")


@pytest.mark.slow
@pytest.mark.parametrize("processes", ["0", "1"])
def test_properties_of_tests_are_in_the_report_for_ci(processes: str, tmp_path: Path) -> None:
    report, durations = tmp_path / "report.xml", tmp_path / "durations"
    test = "tests/devices/test_contract.py::test_lanes_are_made_once"
    done = run_pytest(test, "--junitxml", str(report), "-n", processes, TEST_DURATIONS=str(durations))
    assert done.returncode == pytest.ExitCode.OK, done.stdout
    properties = [(found.get("name"), found.get("value")) for found in ElementTree.parse(report).iter("property")]
    assert ("device", "cpu") in properties
    seconds, passed, name = durations.read_text().split()
    assert (name, int(passed) > 0, float(seconds) > 0) == (test, True, True)
