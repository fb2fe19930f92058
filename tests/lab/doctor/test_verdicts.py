"""The doctor's verdict on a serve command is what the log of that server says when it is ready."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dbo_runtime.lab.whatif.published_cases import get_case
from dbo_runtime.planner.costs.cost_file import save_costs
from tests.support.vllm.engines import TINY
from tests.support.vllm.server import OPTIONS, serve

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

TENSOR, STAGES = "--tensor-parallel-size=2", "--pipeline-parallel-size=2"
EXPERTS = "--data-parallel-size=2 --enable-expert-parallel"
ALWAYS, OFF, COSTS = "DBO_MODE=always", "DBO_MODE=off", "DBO_COSTS="
SERVERS = [
    ("", ""),
    ("", ALWAYS),
    (TENSOR, ""),
    (TENSOR, ALWAYS),
    (TENSOR, OFF),
    (TENSOR, COSTS),
    (f"{TENSOR} --enable-lora", ALWAYS),
    (STAGES, ""),
    (STAGES, ALWAYS),
    (EXPERTS, ""),
    (EXPERTS, ALWAYS),
]


@pytest.mark.parametrize(("layout", "setting"), SERVERS)
def test_the_log_says_what_the_doctor_has_said(layout: str, setting: str, tmp_path: Path) -> None:
    costs = tmp_path / "costs.json"
    save_costs(get_case("r1-tp16-941").table, str(costs))
    name, _, value = setting.partition("=")
    settings = {} if not name else {name: value or str(costs)}
    environment = {"VLLM_ASCEND_ENABLE_DBO": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", **settings}
    told = ask_doctor(layout.split(), environment)
    with serve(TINY, tmp_path / "log", *layout.split(), **environment) as server:
        log = server.log.read_text()
    active, unsplit = log.count("dual-batch overlap is active"), re.findall(r"every step runs unsplit +(.*)", log)
    assert sorted([active, len(unsplit)]) == [0, 2 if layout == STAGES else 1]  # one line, or one for each stage
    if unsplit:
        reason = re.sub(r"stage=\w+ +|reason=| +(detail|model)=.*", "", unsplit[0])
        assert "FAIL" in told
        assert reason in re.sub(r"\s+", " ", told)
    else:
        assert "FAIL" not in told
    misfit = "the costs do not fit this server"
    assert (misfit in re.sub(r"\s+", " ", told)) is (misfit in log) is (setting == COSTS)


def ask_doctor(layout: list[str], environment: dict[str, str]) -> str:
    words = [sys.executable, "-m", "dbo_runtime", "doctor", "--", "vllm", "serve", str(TINY), *OPTIONS, *layout]
    done = subprocess.run(words, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    return done.stdout
