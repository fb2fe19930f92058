"""The faults that take seconds; `python -m tests.reliability.faults` has all of them, and compares with vLLM alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.reliability.faults import make_variables
from tests.support.page import ROOT
from tests.support.reliability import scenarios
from tests.support.reliability.clock import Clock
from tests.support.reliability.layouts import find_place
from tests.support.reliability.observation import observe
from tests.support.reliability.refusals import REFUSALS, refuse
from tests.support.reliability.sandbox import Sandbox
from tests.support.reliability.scenarios import TENSOR, Setting
from tests.support.reliability.servers import Servers

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for a /dev/shm of its own"),
]
GONE_SECONDS = 60.0
LEFT_BY_VLLM = {"`$TMPDIR/*`", "`$TMPDIR/vllm*`", "`/dev/shm/vllm*`"}  # without us, too: see docs/reliability.md


@pytest.fixture
def sandbox(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sandbox]:
    """Return a place whose leftovers are known; paths of sockets must be shorter than pytest's folders."""
    for variable in [name for name in os.environ if name.startswith(("VLLM_", "DBO_", "_DBO_"))]:
        monkeypatch.delenv(variable)  # of engines of other tests
    with tempfile.TemporaryDirectory(prefix="rel-") as folder, Sandbox(Path(folder)) as sandbox:
        yield sandbox


@pytest.mark.parametrize("number", [0], ids=[REFUSALS[0].title])
def test_ranks_that_differ_are_refused(sandbox: Sandbox, number: int) -> None:
    refusal = REFUSALS[number]
    outcome = refuse(Servers(refusal.layout, find_place(), sandbox, make_variables(sandbox.folder)), refusal)
    assert (
        "ConfigError: rank 1 of vLLM's world did not answer within 20 s. Set VLLM_ASCEND_ENABLE_DBO=1" in outcome.cause
    )
    assert_ends_cleanly(outcome.end)
    assert_only_vllm_left(outcome.left)


def test_two_ranks_outlast_a_pause_and_hang_ups_and_end_when_an_op_raises(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scenarios, "STOP_SECONDS", 3.0)
    monkeypatch.setattr(scenarios, "VISITORS", 60)
    clock = Clock(sandbox.folder)
    variables = {**make_variables(sandbox.folder), **clock.variables}
    servers = Servers(TENSOR, find_place(), sandbox, variables)
    setting = Setting(servers, (), clock)
    servers.start()
    try:
        for fault in (scenarios.STOP, scenarios.HANG_UP, scenarios.JUMP):
            outcome = observe(setting, fault, restarts=False)
            assert outcome.end == "serves on", outcome
            assert "wrong" not in outcome.clients
            assert "HTTP" not in outcome.clients
            assert "connection" not in outcome.clients
        outcome = observe(setting, scenarios.RAISE_COMPUTE, restarts=False)
    finally:
        servers.stop_load()
    assert_ends_cleanly(outcome.end)
    assert "a planted error on compute" in outcome.cause
    assert "HTTP 500" in outcome.clients
    assert_only_vllm_left(outcome.left)


RUN = """
import os, subprocess, sys, time
from pathlib import Path
from tests.support.reliability.sandbox import Sandbox

with Sandbox(Path(sys.argv[1])) as sandbox:
    words = sandbox.enter("sleep", "1000")
    print(subprocess.Popen(words, env={**os.environ, **sandbox.environment}).pid, flush=True)
    time.sleep(1000)
"""


def test_a_run_that_is_killed_leaves_no_process_behind(tmp_path: Path) -> None:
    run = subprocess.Popen([sys.executable, "-c", RUN, str(tmp_path)], stdout=subprocess.PIPE, cwd=ROOT)
    assert run.stdout is not None
    server = Path("/proc") / run.stdout.readline().decode().strip()
    deadline = time.monotonic() + 30
    try:
        while (server / "comm").read_text().strip() != "sleep":
            assert time.monotonic() < deadline, "it was not started"
            time.sleep(0.1)
    finally:
        run.kill()
        run.communicate()
    while server.exists() and "State:\tZ" not in (server / "status").read_text():
        assert time.monotonic() < deadline, "it runs on"
        time.sleep(0.1)


def assert_ends_cleanly(end: str) -> None:
    seconds = re.search(r"\bgone (?:after )?(\d+) s", end)
    assert seconds is not None, end
    assert float(seconds[1]) < GONE_SECONDS


def assert_only_vllm_left(left: str) -> None:
    kinds = {each.partition(" ")[2] for each in left.split(", ") if each}
    assert kinds <= LEFT_BY_VLLM
