"""How results of vllm-ascend's own tests are read and compared; running them takes an hour."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ascend.upstream_tests import (
    IN_BOTH,
    ONLY_WITH,
    ONLY_WITHOUT,
    PASSED,
    SKIPPED,
    compare,
    find_files,
    read_report,
)

REPORT = """<testsuites><testsuite>
<testcase classname="tests.ut.core.test_a" name="test_1"/>
<testcase classname="tests.ut.core.test_a.TestB" name="test_2"><failure message="why"/></testcase>
<testcase classname="tests.ut.core.test_a" name="test_3"><skipped/></testcase>
<testcase classname="" name="tests.ut.test_c"><error/></testcase>
</testsuite></testsuites>"""


def test_a_report_is_read_by_file_and_name(tmp_path: Path) -> None:
    (tmp_path / "report.xml").write_text(REPORT)
    assert read_report(tmp_path / "report.xml") == {
        "tests.ut.core.test_a::test_1": "passed",
        "tests.ut.core.test_a.TestB::test_2": "failure",
        "tests.ut.core.test_a::test_3": "skipped",
        "::tests.ut.test_c": "error",
    }


@pytest.mark.parametrize(
    ("off", "on", "group"),
    [
        ("passed", "passed", PASSED),
        ("skipped", "skipped", SKIPPED),
        ("failure", "error", IN_BOTH),
        ("passed", "failure", ONLY_WITH),
        ("passed", None, ONLY_WITH),
        ("error", "passed", ONLY_WITHOUT),
        (None, "passed", ONLY_WITHOUT),
    ],
)
def test_a_test_is_counted_by_both_of_its_outcomes(off: str | None, on: str | None, group: str) -> None:
    without, with_overlap = ({"test": outcome} if outcome else {} for outcome in (off, on))
    assert {name: tests for name, tests in compare(without, with_overlap).items() if tests} == {group: ["test"]}


def test_files_are_found_by_the_tests_that_they_have(tmp_path: Path) -> None:
    folder = tmp_path / "tests" / "ut"
    folder.mkdir(parents=True)
    for name in ("test_a.py", "test_ab.py", "test_c.py"):
        (folder / name).touch()
    names = ["tests.ut.test_a.TestB::test_1", "::tests.ut.test_c"]
    assert find_files(names, tmp_path) == ["tests/ut/test_a.py", "tests/ut/test_c.py"]
