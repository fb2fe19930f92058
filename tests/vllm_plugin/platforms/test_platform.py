"""What each platform supports, and that it is read without torch and without vLLM."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from dbo_runtime.config import RuntimeConfig
from dbo_runtime.vllm_plugin.api.groups import Groups
from dbo_runtime.vllm_plugin.platforms import npu
from dbo_runtime.vllm_plugin.platforms.registry import PLATFORMS, get_platform

PLUGIN = Path(__file__).parents[3] / "dbo_runtime" / "vllm_plugin"
WITHOUT = """
import sys
sys.modules.update(dict.fromkeys(("torch", "vllm", "vllm_ascend", "torch_npu")))
from dbo_runtime.config import RuntimeConfig
from dbo_runtime.vllm_plugin.api import known
from dbo_runtime.vllm_plugin.platforms.registry import PLATFORMS, get_platform
print([str(get_platform(name).check_support(RuntimeConfig(check=True))) for name in PLATFORMS])
"""


def test_platforms_are_read_without_torch_and_without_vllm() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == (str(["None"] * len(PLATFORMS)), "")


def test_only_platforms_know_a_platform_by_its_name() -> None:
    """What differs is asked of the platform's object, so that another one takes no change elsewhere."""
    names = "|".join(PLATFORMS)
    compared = re.compile(rf"""(==|!=|\bin) \(?["']({names})["']|is_cpu\(|is_out_of_tree\(|current_platform""")
    files = [path for path in PLUGIN.rglob("*.py") if path.parent.name not in ("platforms", "api")]
    assert len(files) > 30
    assert [f"{path.name}: {found[0]}" for path in files for found in compared.finditer(path.read_text())] == []


@pytest.mark.parametrize(
    ("platform", "check", "reason"),
    [
        ("cpu", False, None),
        ("cpu", True, None),
        ("npu", False, "vllm-ascend is not installed (with DBO_CHECK=1"),
        ("npu", True, None),
        ("cuda", False, "not proven on 'cuda' yet (with DBO_CHECK=1"),
        ("cuda", True, None),
        ("xpu", True, "there is no device for 'xpu'"),
    ],
)
def test_steps_are_split_where_that_is_proven_or_checked(platform: str, check: bool, reason: str | None) -> None:
    found = get_platform(platform).check_support(RuntimeConfig(enabled=True, check=check))
    assert found is None if reason is None else str(found).startswith(reason)


@pytest.mark.parametrize(("release", "known"), [("0.30.0rc2", True), ("0.30.0", False), ("0.31.0", False)])
def test_the_version_of_vllm_ascend_decides(release: str, known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(npu, "version", lambda name: release)
    found = get_platform("npu").check_support(RuntimeConfig(enabled=True))
    expected = "this version of vllm-ascend is not known to dbo_runtime"
    detail = f"{release}; known: 0.30.0rc2; with DBO_CHECK=1 steps are"
    assert found is None if known else (found.reason == expected and found.detail.startswith(detail))


def test_with_vllm_ascend_other_models_are_compared_or_unsplit() -> None:
    cpu, npu = get_platform("cpu"), get_platform("npu")
    assert npu.check_model("DeepseekV3ForCausalLM", RuntimeConfig(enabled=True)) is None
    assert cpu.check_model("LlamaForCausalLM", RuntimeConfig(enabled=True)) is None
    assert npu.check_model("GraniteForCausalLM", RuntimeConfig(enabled=True, check=True)) is None
    found = npu.check_model("GraniteForCausalLM", RuntimeConfig(enabled=True))
    assert found is not None
    assert found.reason == "this model is not proven with vllm-ascend yet"
    assert found.detail.startswith("GraniteForCausalLM; with DBO_CHECK=1")


@pytest.mark.parametrize("platform", ["npu", "cuda"])
def test_where_devices_have_links_there_is_communication_to_hide_on_one_host(platform: str) -> None:
    one, two = SimpleNamespace(world_size=1), SimpleNamespace(world_size=2)
    assert get_platform(platform).get_transport(Groups(two, two, two), hosts=1) == "device"
    assert get_platform(platform).get_transport(Groups(one, None, one), hosts=1) == "none"
