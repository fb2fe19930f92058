"""The whole kit, from `run.sh` on, on vLLM's CPU build: each part writes its results, and they make sense.

`tests/standin/cann/test_gpu_kit.py` runs the parts of the device over the stand-in for CANN.
"""

from __future__ import annotations

import os
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.support.rehearsals import check_devices, find_failures, read
from tools.gpu_kit.evidence import ResultsError, read_results
from tools.gpu_kit.parts.equal import CUTS
from tools.gpu_kit.plan import PARTS
from tools.gpu_kit.record import NOT_HERE
from tools.gpu_kit.rehearse import make_kit, rehearse

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.vllm
def test_all_parts_run_on_vllms_cpu_build(tmp_path: Path) -> None:
    status = rehearse(tmp_path, "cpu")
    content = read(tmp_path)
    assert find_failures(content) == {}
    assert status == 0
    parts = {name: part["results"] for name, part in content["parts"].items()}
    assert set(parts) == {part.name for part in PARTS}
    check_devices(parts)
    for name in ("llama", "mla"):
        _check_equal(parts["equal"][name])
    assert parts["equal"]["llama-second"].startswith(NOT_HERE)
    _check_equal(parts["two-ranks"]["equal"])
    assert parts["two-ranks"]["pair"]["backend"] == "gloo"
    for model in parts["link"].values():
        _check_times(model)
        assert model["timeline"]["figures"]["busy"].keys() == {"compute", "comm"}
    _check_times(parts["two-ranks"]["halves"])
    (step,) = parts["trace"]["figures"].values()
    assert step["rank 0"]["busy"]["comm"] > 0
    assert (tmp_path / "out" / "profile.pt.trace.json.gz").stat().st_size > 0
    for model, steps in zip(("deep", "wide"), parts["auto"].values(), strict=True):
        assert (tmp_path / "out" / f"costs-{model}.json").stat().st_size > 0
        assert steps["calibration"]["largest"] == 1024
        for name in ("1x800", "4x200"):
            assert all(-0.9 < error < 9 for error in steps[name]["error"].values())
    assert parts["priority"].startswith(NOT_HERE)
    with pytest.raises(ResultsError, match="is of a rehearsal"):
        read_results(tmp_path / "out" / "results.json")


@pytest.mark.slow
@pytest.mark.vllm
def test_a_second_call_runs_one_job_and_unpacks_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert rehearse(tmp_path, "cpu", ["smoke"]) == 0
    assert "gpu_kit: unpacked" in capfd.readouterr().err
    before = read(tmp_path)["parts"]["smoke"]
    assert rehearse(tmp_path, "cpu", ["core/measured"]) == 0
    assert "unpacked" not in capfd.readouterr().err
    parts = read(tmp_path)["parts"]
    assert parts["smoke"] == before
    assert set(parts["core"]["results"]) == {"measured"}


def _check_equal(engine: dict[str, Any]) -> None:
    assert engine["equal"] is True
    compared = {name: each for name, each in engine.items() if name.startswith("split ") and isinstance(each, dict)}
    assert len(compared) == 2 * len(CUTS["cpu"]) + 1  # with each step compared, and once watched for races
    assert engine["split steps"] == sum(each["split steps"] for each in compared.values())
    assert all(each["split steps"] > 0 and each["largest"] <= engine["tolerance"] for each in compared.values())


def _check_times(model: dict[str, Any]) -> None:
    timed = [each for each in model.values() if isinstance(each, dict) and "gain" in each]
    assert timed
    assert all(each["same tokens"] and 0.05 < each["gain"] < 20 for each in timed)
    assert model["steps"]["split"] > 0


def run_kit(kit: Path, folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "KIT_WORK": str(folder / "work"), "OUT": str(folder / "out"), **environment}
    call = ["bash", "tools/gpu_kit/run.sh", str(kit), *words]
    return subprocess.run(call, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)


def test_a_kit_that_is_not_there_or_is_damaged_is_told_in_a_line(tmp_path: Path) -> None:
    done = run_kit(tmp_path / "none", tmp_path)
    assert done.returncode == 2
    assert "is no kit: `make gpu-kit` builds one" in done.stderr
    kit = make_kit(tmp_path / "kit")
    (kit / "site.tar.xz").write_bytes(b"no archive")
    done = run_kit(kit, tmp_path)
    assert done.returncode == 2
    assert "cannot be unpacked into" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_folder_that_cannot_be_made_is_told_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "work").write_text("a file is in its place")
    done = run_kit(make_kit(tmp_path / "kit"), tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("gpu_kit: cannot make ")


def test_an_archive_with_a_package_is_on_the_path_behind_the_working_tree(tmp_path: Path) -> None:
    kit = make_kit(tmp_path / "kit")
    package = tmp_path / "tools"
    package.mkdir()
    (package / "__init__.py").write_text("")  # one that would hide the folder of the checkout
    with tarfile.open(kit / "site.tar.xz", "w:xz") as archive:
        archive.add(package, "tools")
    done = run_kit(kit, tmp_path, "nothing")
    assert done.stderr.splitlines()[-1].startswith("gpu_kit: there is no part 'nothing'")
