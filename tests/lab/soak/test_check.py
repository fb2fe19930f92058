"""Real engines, random traffic: split and unsplit answers are the same, and what cannot be compared is told."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from dbo_runtime import __main__ as program
from dbo_runtime.errors import DeviceError
from dbo_runtime.lab.soak import engine_process
from dbo_runtime.testing import check_equivalence
from tests.support.vllm.engines import TINY
from tests.support.vllm.families import make_family


@pytest.mark.vllm
@pytest.mark.slow
def test_300_requests_are_answered_alike() -> None:
    """100 with each number of micro-batches, on two ranks; the long run is `make soak`."""
    blocks = 19  # of 16 tokens: one of the longest requests and little more, so that these few preempt each other, too
    options = {"attention_backend": "CPU_MLA", "tensor_parallel_size": 2, "num_gpu_blocks_override": blocks}
    report = check_equivalence(str(TINY), {}, 100, (2, 3, 4), seed=24, **options)
    assert report, str(report)
    for tally in report.tallies:
        assert tally.requests == 100
        assert tally.equal + tally.ties + tally.own == 100
        assert tally.counts.split > 50
        assert tally.counts.preempted > 0
        assert tally.aborted > 0
        assert 0 < tally.largest < 1e-4  # two ranks add up in another order


@pytest.mark.vllm
@pytest.mark.slow
def test_100_requests_are_answered_alike_in_nano_batches() -> None:
    options = {"attention_backend": "CPU_MLA", "tensor_parallel_size": 2}
    report = check_equivalence(str(TINY), {"DBO_SPLIT": "nano"}, 100, (3,), seed=24, **options)
    assert report, str(report)
    (tally,) = report.tallies
    assert tally.counts.nano > 50
    assert tally.counts.split == 0
    assert 0 < tally.largest < 1e-4


@pytest.mark.vllm
@pytest.mark.slow
def test_the_command_says_what_was_compared(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Without an adapter nothing is split, which is no proof of anything."""
    granite = str(make_family("GraniteForCausalLM", tmp_path))
    words = ["--requests", "8", "--attention-backend", "CPU_ATTN", "--block-size", "32", "--json"]
    assert program.main(["soak", granite, *words]) == 1
    facts = json.loads(capfd.readouterr().out)
    assert facts["failure"].startswith("no step was split into 2 micro-batches")
    (tally,) = facts["micro_batches"]
    assert (tally["requests"], tally["equal"], tally["split"]) == (8, 8, 0)


@pytest.mark.vllm
@pytest.mark.slow
def test_a_model_that_does_not_start_is_an_error_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(DeviceError, match="vLLM fails"):
        check_equivalence(str(tmp_path), requests=8)


def test_a_start_that_fails_is_one_line_with_the_name_of_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("hypothesis")
    (tmp_path / "failing.py").write_text(
        """
import sys
from multiprocessing.connection import Connection
print("a line of the log", flush=True)
pipe = Connection(int(sys.argv[1]))
pipe.recv()
pipe.send((False, "Traceback (most recent call last):\\n  File x\\nOSError: there is no such model"))
"""
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setattr(engine_process, "MODULE", "failing")
    assert program.main(["soak", str(tmp_path), "--requests", "8"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("dbo_runtime soak: vLLM fails: there is no such model. vLLM's log: ")
    assert said.count("\n") == 1
    log = Path(said.split()[-1])
    assert {"a line of the log", "OSError: there is no such model"} < set(log.read_text().splitlines())
    log.unlink()
