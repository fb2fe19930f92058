"""The trials of vLLM's registry: their tiny configs, how they are judged, and what the page says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import partial
from typing import Any

import pytest

from tests.registry.coverage import PAGE, run_forked
from tests.registry.outcome import (
    ADAPTER,
    BREAKS,
    DECLINED,
    GENERIC,
    NOT_RUN,
    Outcome,
    find_decline,
    find_error,
    judge,
    make_lines,
)
from tests.registry.tiny_configs import list_architectures, make_config
from tests.support.page import ROOT

GOAL = 0.8  # of the architectures that vLLM's CPU build runs
ANSWERS = [[[7, -1.5], [9, -0.25]]]
OTHERS = [[[7, -1.5], [8, -0.25]]]
LOG = "[dbo_runtime] every step runs unsplit  reason=not supported yet: a state-space model  detail=Mamba  model=X\n"


def make_trial(**found: Any) -> dict[str, Any]:
    return {"answers": ANSWERS, "steps": [0, 0], "adapter": None, "log": LOG, **found}


SPLIT = make_trial(steps=[4, 4], **{"unsplit answers": ANSWERS})
PLAIN = make_trial()
FAILED = {"error": "RuntimeError: Worker failed with error 'no kernel', please check the stack trace", "log": ""}


@pytest.mark.parametrize(
    ("tried", "expected"),
    [
        ({"overlap": {**SPLIT, "adapter": "a.B"}}, Outcome(ADAPTER, 4, "a.B")),
        ({"overlap": SPLIT, "no adapter": PLAIN}, Outcome(GENERIC, 4)),
        (
            {"overlap": PLAIN, "no adapter": PLAIN},
            Outcome(DECLINED, 0, "not supported yet: a state-space model (Mamba)"),
        ),
        ({"overlap": FAILED, "no adapter": PLAIN, "vLLM alone": PLAIN}, Outcome(BREAKS, 0, "no kernel")),
        ({"overlap": PLAIN, "no adapter": FAILED, "vLLM alone": PLAIN}, Outcome(BREAKS, 0, "no kernel")),
        ({"overlap": FAILED, "no adapter": FAILED, "vLLM alone": FAILED}, Outcome(NOT_RUN, 0, "no kernel")),
        ({"overlap": {**SPLIT, "unsplit answers": OTHERS}}, Outcome(BREAKS, 4, "answers differ")),
        ({"overlap": SPLIT, "no adapter": {**PLAIN, "answers": OTHERS}}, Outcome(BREAKS, 4, "answers differ")),
        (
            {"overlap": {**SPLIT, "steps": [4, 3]}, "no adapter": PLAIN},
            Outcome(BREAKS, 0, "the ranks have split different numbers of steps"),
        ),
    ],
)
def test_trials_are_judged(tried: dict[str, Any], expected: Outcome) -> None:
    assert judge(tried) == expected


def test_a_decline_is_read_from_the_log() -> None:
    assert find_decline({"log": "step not split  reason=nowhere to cut\n"}) == "nowhere to cut"
    assert find_decline({"log": "nothing"}) == "no step was split"


def test_the_cause_is_a_workers_own() -> None:
    log = "ERROR [x.py:1] AttributeError: no field\nERROR [x.py:2] Exception: WorkerProc failed. See stack trace\n"
    error = "Exception: WorkerProc failed. See stack trace for root cause."
    assert find_error({"error": error, "log": log}) == "AttributeError: no field"


def test_shares_are_of_what_vllm_runs() -> None:
    outcomes = {
        "A": Outcome(ADAPTER, 4, "a.B"),
        "B": Outcome(DECLINED, 0, "x"),
        "C": Outcome(NOT_RUN, 0, "y"),
        "D": Outcome(GENERIC, 4, ""),
        "E": Outcome(DECLINED, 0, "z"),
    }
    text = "\n".join(make_lines(outcomes))
    assert "Of 5 text architectures, vLLM's CPU build runs 4 as tiny models." in text
    assert "**1 of these 4 overlap by default (25%), 2 with `DBO_GENERIC=1` (50%)**; 2 are declined" in text


def test_a_job_that_fails_or_dies_is_an_error_with_its_log() -> None:
    def fail() -> dict[str, Any]:
        sys.stdout.write("on the way")
        sys.stdout.flush()
        raise ValueError("no such size")

    failed = run_forked(fail)
    assert failed["error"] == "ValueError: no such size"
    assert "on the way" in failed["log"]
    assert "error" in run_forked(partial(os._exit, 3))
    assert "error" not in run_forked(lambda: {"answers": []})


@pytest.mark.vllm
def test_there_is_a_tiny_config_and_a_row_for_every_text_architecture() -> None:
    architectures = list_architectures()
    assert len(architectures) > 100
    for architecture in architectures:
        assert make_config(architecture)["architectures"] == [architecture]
    rows = set(re.findall(r"^\| `(\w+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
    assert rows == set(architectures), "make try-registry"


def test_the_page_reaches_the_goal_and_nothing_breaks() -> None:
    text = PAGE.read_text(encoding="utf-8")
    found = re.search(r" of these (\d+) overlap by default .* (\d+) with `DBO_GENERIC=1` .* (\d+) break\.", text)
    assert found is not None
    run, overlap, broken = map(int, found.groups())
    assert overlap >= GOAL * run
    assert broken == 0


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "what"),
    [("Qwen3ForCausalLM", ADAPTER), ("GPTNeoXForCausalLM", GENERIC), ("OlmoeForCausalLM", DECLINED)],
)
def test_architectures_come_to_what_the_page_says(architecture: str, what: str) -> None:
    # In a process of its own: trials are forked, and the one that runs the tests has threads.
    command = [sys.executable, "-m", "tests.registry.coverage", "--only", architecture]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=True)
    assert f"{architecture}: {what}:" in ran.stdout, ran.stdout + ran.stderr
    assert re.search(rf"^\| `{architecture}` \| {what} \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
