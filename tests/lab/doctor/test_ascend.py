"""What doctor says where there is an NPU, or something that is made for one."""

from __future__ import annotations

from pathlib import Path

import pytest

from dbo_runtime.lab.doctor.ascend import list_chips
from tests.support.surroundings import Surroundings

NPU = """
class Npu:
    def is_available(self):
        return {there}

    def device_count(self):
        return 2

    def get_device_name(self, number):
        return "Ascend910B1"

import torch
torch.npu = Npu()
"""


@pytest.fixture
def ascend(serving: Surroundings) -> Surroundings:
    """Return an environment with CANN and the vllm-ascend of vLLM's version; torch_npu is up to the test.

    torch has the names that `dbo_runtime.devices.npu` imports besides torch itself.
    """
    home = serving.home / "Ascend" / "cann"
    (home / "aarch64-linux").mkdir(parents=True)
    (home / "aarch64-linux" / "ascend_toolkit_install.info").write_text("package_name=Ascend-cann\nversion=9.1.0\n")
    (home / "set_env.sh").write_text("export ASCEND_HOME_PATH=...\n")
    serving.variables["ASCEND_HOME_PATH"] = str(home)
    serving.describe("vllm_ascend", "0.30.0rc2")
    return serving


def test_an_npu_that_works_is_counted(ascend: Surroundings) -> None:
    ascend.add("torch_npu", "2.13.0.post4", NPU.format(there=True))
    found = ascend.examine()
    assert found["status"] == 0
    assert found["torch_npu"]["found"] == "2.13.0.post4; 2 NPU: Ascend910B1"
    assert found["devices"]["found"] == "2 npu (Ascend910B1), no cuda, cpu"
    assert found["CANN"]["found"].startswith("9.1.0, in ")
    assert found["vllm-ascend"]["state"] == "ok"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("raise ImportError('libhccl.so: cannot open shared object file')", "libhccl.so: cannot open shared object"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "was ended by SIGSEGV"),
        ("import os; os._exit(3)", "ended with 3"),
        ("raise SystemExit('no CANN')", "SystemExit: no CANN"),
        ("x = 'a' * 9000; raise ImportError(x)", "aaa ..."),
    ],
)
def test_a_broken_torch_npu_is_a_finding_with_its_own_words(code: str, said: str, ascend: Surroundings) -> None:
    ascend.add("torch_npu", "2.13.0", code)
    found = ascend.examine()
    assert (found["status"], found["torch_npu"]["state"]) == (1, "fail")
    assert said in found["torch_npu"]["found"]
    assert found["devices"]["found"].startswith("no npu")


def test_a_torch_npu_for_another_torch_is_reported(ascend: Surroundings) -> None:
    ascend.add("torch_npu", "2.10.0.post4", "raise ImportError('undefined symbol')")
    found = ascend.examine()
    assert found["torch_npu"]["found"].startswith(
        "2.10.0.post4, made for another torch than 2.13.0, cannot be imported"
    )
    assert found["torch_npu"]["remedy"] == "install torch_npu 2.13.0"


def test_a_torch_npu_that_finds_no_npu_is_no_failure(ascend: Surroundings) -> None:
    ascend.add("torch_npu", "2.13.0", NPU.format(there=False))
    found = ascend.examine()
    assert (found["status"], found["torch_npu"]["state"]) == (0, "warn")
    assert "torch_npu finds no NPU" in found["torch_npu"]["found"]


def test_cann_whose_set_env_was_not_sourced_is_named(ascend: Surroundings) -> None:
    home = ascend.variables.pop("ASCEND_HOME_PATH")
    ascend.add("torch_npu", "2.13.0", "raise ImportError('libhccl.so')")
    found = ascend.examine()
    assert (found["status"], found["CANN"]["state"]) == (1, "fail")
    assert found["CANN"]["remedy"] == f"source {home}/set_env.sh"


def test_a_cann_that_is_gone_is_reported(ascend: Surroundings) -> None:
    found = ascend.examine(ASCEND_HOME_PATH="/nowhere/cann")
    assert (found["status"], found["CANN"]["state"]) == (0, "warn")  # without torch_npu, nothing needs it
    assert found["CANN"]["found"] == "ASCEND_HOME_PATH=/nowhere/cann, but there is no such folder"


@pytest.mark.parametrize(
    ("version", "state", "said"),
    [
        ("0.11.0", "fail", "has a switch VLLM_ASCEND_ENABLE_DBO of its own"),
        ("0.18.0", "warn", "0.18.0, but vLLM is 0.30.0"),
    ],
)
def test_a_vllm_ascend_of_another_version_is_reported(
    version: str, state: str, said: str, serving: Surroundings
) -> None:
    serving.describe("vllm_ascend", version)
    found = serving.examine()["vllm-ascend"]
    assert found["state"] == state
    assert said in found["found"]


def test_chips_are_what_the_driver_shows(tmp_path: Path) -> None:
    for name in ("davinci0", "davinci1", "davinci_manager", "null"):
        (tmp_path / name).touch()
    assert list_chips(tmp_path) == ["davinci0", "davinci1"]
