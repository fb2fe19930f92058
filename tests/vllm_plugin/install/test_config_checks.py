"""What the doctor says of serve commands that the real vLLM parses, each in a process of its own."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dbo_models.dense import DenseAdapter
from dbo_runtime.config import RuntimeConfig
from dbo_runtime.lab.doctor.finding import Finding
from dbo_runtime.lab.doctor.serve_command import ServeCommand, check_serve_command
from dbo_runtime.vllm_plugin.alternatives.generic import SUMS_NOTHING
from dbo_runtime.vllm_plugin.install.config_checks import list_declines
from tests.support.vllm.configs import LORA, make_config

pytestmark = pytest.mark.vllm

ROOT = Path(__file__).parents[3]
MODEL = str(ROOT / "examples" / "tiny-deepseek")


def check(*arguments: str) -> list[Finding]:
    """Return the findings of serving the tiny DeepSeek with these options."""
    settings = {"VLLM_ASCEND_ENABLE_DBO": "1", "DBO_MODE": "always"}
    return check_serve_command(ServeCommand({}, (MODEL, *arguments)), {**os.environ, **settings})


@pytest.mark.slow
def test_a_command_whose_steps_are_split() -> None:
    drafts = json.dumps({"method": "ngram", "num_speculative_tokens": 3})
    transfer = json.dumps({"kv_connector": "NixlConnector", "kv_role": "kv_producer"})
    (found,) = check(
        "--tensor-parallel-size=2",
        "--enable-expert-parallel",
        f"--speculative-config={drafts}",
        f"--kv-transfer-config={transfer}",
    )
    layout = "DeepseekV3ForCausalLM on cpu, tensor parallel 2, expert parallel 2"
    assert found == Finding("command", "ok", f"{layout}: all-reduces would overlap with computation")


@pytest.mark.slow
def test_everything_that_prevents_splitting_is_listed_not_the_first_only() -> None:
    drafts = json.dumps({"method": "ngram", "num_speculative_tokens": 3})
    module = "tests.support.vllm.layer_recorder"
    transfer = json.dumps({"kv_connector": "LayerRecorder", "kv_connector_module_path": module, "kv_role": "kv_both"})
    layout, *found = check(
        "--tensor-parallel-size=2",
        "--pipeline-parallel-size=2",
        "--enable-lora",
        f"--speculative-config={drafts}",
        f"--kv-transfer-config={transfer}",
    )
    assert layout.found.endswith("tensor parallel 2, pipeline parallel 2: every step would run unsplit")
    assert [(finding.state, finding.found.partition(";")[0]) for finding in found] == [
        ("fail", "not supported yet: speculative decoding in a pipeline"),
        ("fail", "not supported yet: LoRA with a mixture of experts"),
        ("fail", "not supported yet: LoRA with latent attention"),
        ("fail", "the KV connector is not known to dbo_runtime (LayerRecorder"),
    ]


@pytest.mark.parametrize(
    ("changes", "config", "has_adapter", "reason"),
    [
        ({"use_v2_model_runner": True}, RuntimeConfig(), True, "not proven with vLLM's second model runner yet"),
        ({"use_v2_model_runner": True}, RuntimeConfig(check=True), True, None),
        ({"lora_config": LORA}, RuntimeConfig(), True, None),
        ({"lora_config": LORA}, RuntimeConfig(compile=True), True, "not supported yet: LoRA with DBO_COMPILE=1"),
        ({"lora_config": LORA}, RuntimeConfig(generic=True), True, None),
        ({"lora_config": LORA}, RuntimeConfig(generic=True), False, "not supported yet: LoRA with DBO_GENERIC=1"),
        ({"tensor_parallel_size": 1}, RuntimeConfig(generic=True), True, None),
        ({"tensor_parallel_size": 1}, RuntimeConfig(generic=True), False, SUMS_NOTHING.reason),
    ],
)
def test_some_features_depend_on_settings(
    changes: dict[str, Any], config: RuntimeConfig, has_adapter: bool, reason: str | None
) -> None:
    vllm_config: Any = make_config(architecture="LlamaForCausalLM", **changes)
    adapter = DenseAdapter() if has_adapter else None
    assert [decline.reason for decline in list_declines(vllm_config, config, adapter)] == ([reason] if reason else [])


@pytest.mark.slow
def test_a_command_that_vllm_does_not_accept_is_reported_in_its_words() -> None:
    (found,) = check("--tensor-parallel-size=3")
    problem = "Total number of attention heads (4) must be divisible by tensor parallel size (3)."
    assert (found.state, found.found) == ("fail", f"vLLM does not accept it: {problem}")


@pytest.mark.slow
def test_an_option_that_vllm_does_not_know_does_not_hide_what_prevents_splitting() -> None:
    unknown, layout, *declines = check("--no-such-option", "--tensor-parallel-size=2", "--dtype=float16")
    assert "does not know --no-such-option" in unknown.found
    assert "tensor parallel 2: every step would run unsplit" in layout.found
    assert [decline.found for decline in declines] == [
        "fp16 needs the decoder layer's own scaling; serve in bf16 or fp32"
    ]


@pytest.mark.slow
def test_the_commands_on_the_page_are_answered_as_it_says() -> None:
    page = (ROOT / "docs" / "settings.md").read_text().partition("### Would this command be split?")[2]
    block = re.search(r"^```\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert block is not None
    for shown in block[1].split("$ ")[1:]:
        command, *lines = shown.splitlines()
        variables, _, words = command.partition(" dbo doctor -- ")
        done = subprocess.run(
            [sys.executable, "-m", "dbo_runtime", "doctor", "--", *shlex.split(words)],
            env={**os.environ, **dict(variable.split("=") for variable in variables.split())},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert "\n".join(["", *lines, ""]) in done.stdout
        assert done.returncode == (1 if any(line.startswith("FAIL") for line in lines) else 0)
