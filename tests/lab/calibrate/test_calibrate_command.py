"""Costs from one program to the next: `python -m dbo_runtime calibrate` writes them, a start of vLLM plans by them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dbo_runtime.__main__ import main
from dbo_runtime.config import ENABLE, SWITCHES
from dbo_runtime.lab.calibrate.calibrate_command import EXTENSION
from dbo_runtime.lab.calibrate.report import Report
from dbo_runtime.lab.whatif.published_cases import get_case
from dbo_runtime.lab.whatif.scale import set_layers
from dbo_runtime.planner.costs.cost_file import load_costs, save_costs
from tests.support.vllm.engines import TINY

OPTIONS = {
    "dtype": "float32",
    "attention_backend": "CPU_MLA",
    "enforce_eager": True,
    "max_model_len": 128,
    "max_num_batched_tokens": 128,
    "max_num_seqs": 8,
    "kv_cache_memory_bytes": 1 << 26,
}
WORDS = [
    word
    for name, value in OPTIONS.items()
    for word in (f"--{name.replace('_', '-')}", *([] if value is True else [str(value)]))
]
ON = {ENABLE: "1", "DBO_MODE": "always", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
SERVE = f"""
from vllm import LLM, SamplingParams
llm = LLM({str(TINY)!r}, **{OPTIONS!r})
prompts = [{{"prompt_token_ids": list(range(3, 3 + length))}} for length in (40, 50)]
answers = llm.generate(prompts, SamplingParams(max_tokens=4, temperature=0, ignore_eos=True), use_tqdm=False)
print("answered", [len(answer.outputs[0].token_ids) for answer in answers])
"""


def run(words: list[str], **settings: str) -> subprocess.CompletedProcess[str]:
    """Run a program that starts vLLM with one rank on one core."""
    variables = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR"}
    env = {**os.environ, **variables, **settings}
    return subprocess.run([sys.executable, *words], env=env, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.vllm
@pytest.mark.slow
def test_costs_that_the_command_writes_are_planned_by_at_the_next_start(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    command = ["-m", "dbo_runtime", "calibrate", str(TINY), "--output", str(path), "--budget", "5", "--json", *WORDS]
    done = run(command, VLLM_LOGGING_LEVEL="INFO")  # which goes elsewhere than what is asked for
    assert done.returncode == 0, done.stderr[-4000:]
    table = load_costs(path)
    told = json.loads(done.stdout)
    assert (told["output"], told["digest"]) == (str(path), table.digest)
    assert told["op_errors"] == pytest.approx(dict(table.errors))
    assert set(told["step_errors"]) == {"unsplit", "split"}
    assert told["split_error"] == pytest.approx(table.split_error)

    served = run(["-c", SERVE], **ON, DBO_COSTS=str(path))
    assert served.returncode == 0, served.stderr[-4000:]
    assert "answered [4, 4]" in served.stdout
    (line,) = (line for line in served.stderr.splitlines() if "planning by costs" in line)
    assert f"source={path}  kind=measured  date={table.provenance.date}  digest={table.digest}" in line
    assert re.search(r"new plan  micro_batches=\d  policy=optimal-", served.stderr)


@pytest.mark.vllm
@pytest.mark.slow
def test_a_start_that_is_asked_to_calibrates_and_writes_what_it_plans_by(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    served = run(["-c", SERVE], **ON, DBO_CALIBRATE="1", DBO_COSTS=str(path))
    assert served.returncode == 0, served.stderr[-4000:]
    assert "answered [4, 4]" in served.stdout
    assert f"source=calibration  kind=measured  date={load_costs(path).provenance.date}" in served.stderr
    assert f"digest={load_costs(path).digest}" in served.stderr


REPORT = Report(
    6.6, "0123456789abcdef", {"attention": 0.031}, {"unsplit": 0.01, "split": 0.02}, 0.05, {"compute": 1.25}, 8192, 0
)


@pytest.fixture
def _in_a_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Work in a new folder that has the cost files which the ranks would write."""
    monkeypatch.chdir(tmp_path)
    for name in ("costs.json", "costs.pp0.json", "costs.pp1.json"):
        save_costs(set_layers(get_case("a3-layer-4894").table, (4,)), tmp_path / name)


class Host:
    """Stands for vLLM's `LLM`: keeps what it is started with, and answers as it is told to."""

    def __init__(self, answers: list[dict[str, Any] | None] | Exception) -> None:
        self.options: dict[str, Any] = {}
        self.asked: list[Any] = []
        self.closed = False
        self.llm_engine = SimpleNamespace(engine_core=SimpleNamespace(shutdown=self._close))
        self._answers = answers

    def start(self, **options: Any) -> Host:
        os.write(1, b"INFO 11-27 04:32:43 vLLM's own lines\n")  # past Python, as its processes do
        self.options = options
        return self

    def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[dict[str, Any] | None]:
        self.asked.append((method, *args))
        if isinstance(self._answers, Exception):
            raise self._answers
        return self._answers

    def _close(self) -> None:
        self.closed = True


def calibrate(monkeypatch: pytest.MonkeyPatch, host: Host, *words: str) -> int:
    monkeypatch.setattr("vllm.LLM", host.start)
    for name in SWITCHES:
        monkeypatch.setenv(name, "0")
    status = main(["calibrate", str(TINY), "--output", "costs.json", *words])
    assert os.environ[ENABLE] == "1"
    assert host.closed
    return status


@pytest.mark.slow
@pytest.mark.usefixtures("_in_a_folder")
def test_the_command_hands_all_other_arguments_to_vllm(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    host = Host([asdict(REPORT), asdict(replace(REPORT, seconds=9.0))])
    words = ("--budget", "7", "--tensor-parallel-size", "2", "--enforce-eager", "--dtype=float32")
    assert calibrate(monkeypatch, host, *words) == 0
    assert host.asked == [("dbo_calibrate", str(tmp_path / "costs.json"), 7.0, "")]
    expected = {"model": str(TINY), "tensor_parallel_size": 2, "enforce_eager": True, "dtype": "float32"}
    assert {name: host.options[name] for name in expected} == expected
    assert host.options["worker_extension_cls"] == EXTENSION
    output, errors = capfd.readouterr()
    lines = output.splitlines()
    assert str(REPORT) in output  # the first rank's
    assert "vLLM's own" not in output
    assert lines[-3].startswith("With these costs prefills from 2048 tokens will be split; the largest predicted gain")
    assert lines[-2] == "More: dbo plan --costs costs.json --sweep tokens"
    assert lines[-1].startswith("serve with it: VLLM_ASCEND_ENABLE_DBO=1 DBO_COSTS=costs.json vllm serve")
    assert re.fullmatch(r"starting vLLM; its log goes to (\S+)\n", errors)
    assert not Path(errors.split()[-1]).exists()


def test_the_report_comes_as_json_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert calibrate(monkeypatch, Host([asdict(REPORT)]), "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told == {"model": str(TINY), "output": str(tmp_path / "costs.json"), **asdict(REPORT)}


@pytest.mark.usefixtures("_in_a_folder")
def test_of_a_pipeline_each_stage_is_reported_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = [replace(REPORT, seconds=float(rank), stage=f"pp{rank // 2}") for rank in range(4)]
    answers = [asdict(rank) for rank in ranks]
    assert calibrate(monkeypatch, Host([*answers, None]), "--json") == 0  # of a stage that is not split
    assert json.loads(capsys.readouterr().out)["stages"] == [answers[0], answers[2]]
    assert calibrate(monkeypatch, Host(answers)) == 0
    told = capsys.readouterr().out
    assert told.startswith(f"{ranks[0]}\nWith these costs")
    assert f"costs.pp0.json --sweep tokens\n{ranks[2]}\nWith these costs" in told
    assert "pp1: calibrated in 2 s; costs " in told


def test_a_model_that_is_not_split_cannot_be_calibrated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert calibrate(monkeypatch, Host([None, None])) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(
        "dbo_runtime calibrate: this model is not split, so there is nothing to measure. vLLM's log: "
    )
    log = Path(last.partition("vLLM's log: ")[2].split()[0])
    assert log.exists()
    log.unlink()


def test_with_verbose_the_log_is_on_standard_error(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert calibrate(monkeypatch, Host([asdict(REPORT)]), "--json", "--verbose") == 0
    output, errors = capfd.readouterr()
    assert json.loads(output)["digest"] == REPORT.digest
    assert "vLLM's own lines" in errors


@pytest.mark.parametrize("output", ["absent/costs.json", "."])
def test_a_file_that_cannot_be_written_is_refused_before_vllm_starts(
    output: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("vllm.LLM", None)  # calling it is an error
    for name in SWITCHES:
        monkeypatch.setenv(name, "0")
    assert main(["calibrate", str(TINY), "--output", str(tmp_path / output)]) == 2
    assert f"cost file {tmp_path / output} cannot be written." in capsys.readouterr().err


def test_a_calibration_that_fails_ends_what_was_started_and_says_so_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert calibrate(monkeypatch, Host(RuntimeError("a worker has died"))) == 2
    _, said = capfd.readouterr().err.splitlines()
    assert said.startswith("dbo_runtime calibrate: vLLM fails: a worker has died. vLLM's log: ")
    log = Path(said.partition("vLLM's log: ")[2].split()[0])
    assert "vLLM's own lines" in log.read_text()
    log.unlink()


def test_an_option_that_vllm_does_not_know_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in SWITCHES:
        monkeypatch.setenv(name, "0")
    assert main(["calibrate", str(TINY), "--output", "costs.json", "--tensor-paralel", "2"]) == 2
    assert capfd.readouterr().err.splitlines()[1:] == [
        "dbo_runtime calibrate: vLLM does not know --tensor-paralel. Correct it, or leave it out."
    ]
