"""What all benchmarks have: the option that writes the page, and the fixture that tells figures."""

from __future__ import annotations

import faulthandler
from functools import partial

import pytest

from tests.support.page import Publish, tell_section


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let the page be written when asked."""
    parser.addoption("--write-page", action="store_true", help="write the figures to docs/benchmarks.md, too")


@pytest.fixture
def publish(request: pytest.FixtureRequest) -> Publish:
    """Print a section of the page, and write it if asked."""
    return partial(tell_section, request.config.getoption("--write-page"))


@pytest.fixture(autouse=True)
def no_limit() -> None:
    """Let benchmarks take longer than tests may: no stacks are printed after `faulthandler_timeout`."""
    faulthandler.cancel_dump_traceback_later()
