"""What is read in the logs of servers."""

from __future__ import annotations

import pytest

from tests.support.reliability.servers import find_cause

APPLIED = "INFO 11-25 14:40:01 [dbo_runtime] patched  symptom=data parallel MoE ends in NotImplementedError: no gather"
OURS = "(Worker pid=1) ERROR 11-25 14:41:00 [dbo_runtime] a split step failed  error=RuntimeError('no')"
THEIRS = "(EngineCore pid=2) TimeoutError: RPC call to execute_model timed out."
REFUSED = "(Worker pid=1) dbo_runtime.errors.ConfigError: give all ranks the same settings"


@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        ([], ""),
        ([APPLIED], ""),
        ([APPLIED, THEIRS], "TimeoutError: RPC call to execute_model timed out."),
        ([APPLIED, THEIRS, OURS], "a split step failed  error=RuntimeError('no')"),
        ([OURS, REFUSED, THEIRS], "ConfigError: give all ranks the same settings"),
    ],
)
def test_the_cause_is_a_refusal_or_what_we_say_or_the_first_error(lines: list[str], cause: str) -> None:
    assert find_cause("\n".join(lines)) == cause
