from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import structlog

from dbo_runtime.observe.logs import open_log


@pytest.fixture(autouse=True)
def _restore_structlog() -> Iterator[None]:
    structlog.reset_defaults()
    yield
    structlog.reset_defaults()


def test_a_line_goes_to_standard_error_with_its_figures(capsys: pytest.CaptureFixture[str]) -> None:
    open_log().info("new plan", micro_batches=2, digest="ab12")
    captured = capsys.readouterr()
    assert captured.out == ""
    line = r"INFO \d\d-\d\d \d\d:\d\d:\d\d \[dbo_runtime\] new plan  micro_batches=2  digest=ab12\n"
    assert re.fullmatch(line, captured.err)


def test_a_figure_that_is_not_there_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    open_log().info("step not split", reason="nowhere to cut", detail=None)
    assert capsys.readouterr().err.endswith("step not split  reason=nowhere to cut\n")


def test_a_quiet_log_drops_what_is_less_than_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    log = open_log(quiet=True)
    log.info("new plan")
    log.warning("odd")
    log.error("wrong")
    assert re.fullmatch(r"ERROR .* wrong\n", capsys.readouterr().err)


def test_opening_a_log_configures_nothing_for_others() -> None:
    open_log()
    assert not structlog.is_configured()


def test_a_host_that_configured_structlog_keeps_its_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    lines = structlog.testing.LogCapture()
    structlog.configure(processors=[lines])
    open_log().info("new plan", digest="ab12")
    assert lines.entries == [{"event": "new plan", "digest": "ab12", "log_level": "info"}]
    assert capsys.readouterr().err == ""
