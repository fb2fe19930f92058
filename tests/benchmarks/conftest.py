"""What all benchmarks have: the option that writes the page, and the fixture that tells figures."""

from __future__ import annotations

import faulthandler
from collections.abc import Sequence

import pytest

from tests.benchmarks.plots import draw_section
from tests.support.page import Publish, tell_section


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let the page be written when asked."""
    parser.addoption("--write-page", action="store_true", help="write the figures to docs/benchmarks.md, too")


@pytest.fixture
def publish(request: pytest.FixtureRequest) -> Publish:
    """Print a section of the page; if asked, write it, and draw its plot."""
    is_written: bool = request.config.getoption("--write-page")

    def publish_section(name: str, command: str, lines: Sequence[str]) -> None:
        tell_section(is_written, name, command, lines)
        if is_written:
            draw_section(name)

    return publish_section


@pytest.fixture(autouse=True)
def no_limit() -> None:
    """Let benchmarks take longer than tests may: no stacks are printed after `faulthandler_timeout`."""
    faulthandler.cancel_dump_traceback_later()
