"""Adapters are found by the backbone that an architecture holds, in serving and by the doctor alike."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from dbo_runtime.adapters.contract import name_adapter
from dbo_runtime.adapters.registry import get_adapter, get_backbone_adapter, name_backbones
from dbo_runtime.lab.doctor.model import check_model
from dbo_runtime.vllm_plugin.api.model_classes import find_adapter, is_derived, list_classes

pytestmark = pytest.mark.vllm

DENSE, DEEPSEEK, VL = "dense.DenseAdapter", "deepseek.DeepseekAdapter", "qwen_vl_text.Qwen3VLAdapter"
FOUND = {
    "Qwen3ForCausalLM": DENSE,
    "Qwen3Model": DENSE,
    "Qwen3ForSequenceClassification": DENSE,
    "Qwen2ForTokenClassification": DENSE,
    "Qwen2ForRewardModel": DENSE,
    "Qwen2ForProcessRewardModel": DENSE,
    "MistralModel": DENSE,
    "LlamaBidirectionalModel": DENSE,  # by the class that it derives from
    "LlamaBidirectionalForSequenceClassification": DENSE,
    "JinaEmbeddingsV5Model": DENSE,
    "LLaMAForCausalLM": DENSE,  # by the class that serves it
    "Phi3ForCausalLM": DENSE,
    "Ministral3ForCausalLM": DENSE,
    "CwmForCausalLM": DENSE,
    "InternLM3ForCausalLM": DENSE,
    "IQuestCoderForCausalLM": DENSE,
    "TeleChat3ForCausalLM": DENSE,
    "JinaForRanking": DENSE,  # by the backbone that its class makes
    "VoyageQwen3BidirectionalEmbedModel": DENSE,
    "DeepseekV3ForSequenceClassification": DEEPSEEK,
    "Qwen3VLForSequenceClassification": VL,
    "ColQwen3": VL,
    "BertModel": None,
    "GteNewModel": None,
    "NoSuchModel": None,
    "Model": None,
}


OF_TRANSFORMERS = {"CwmForCausalLM"}
"""Architectures that vLLM serves with its Transformers backend from 0.32 on, and with a class of its own before."""


@pytest.mark.parametrize(("architecture", "adapter"), FOUND.items())
def test_an_architecture_has_the_adapter_of_its_backbone(architecture: str, adapter: str | None) -> None:
    if architecture in OF_TRANSFORMERS and "TransformersForCausalLM" in list_classes(architecture):
        adapter = None
    found = find_adapter(architecture)
    assert (None if found is None else name_adapter(found)) == (adapter and f"dbo_models.{adapter}")


@pytest.mark.slow
@pytest.mark.parametrize(
    "architecture",
    [
        "JinaForRanking",
        pytest.param("Qwen3ForSequenceClassification", marks=pytest.mark.slow),
        pytest.param("BertModel", marks=pytest.mark.slow),
    ],
)
def test_the_doctor_finds_what_serving_does(architecture: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}), encoding="utf-8")
    (finding,) = check_model(str(tmp_path), environ=os.environ)
    expected = find_adapter(architecture)
    assert finding.state == ("fail" if expected is None else "ok")
    assert expected is None or name_adapter(expected) in finding.found


def test_names_of_backbones_are_those_that_vllm_derives() -> None:
    assert name_backbones("Qwen3ForSequenceClassification") == [
        "Qwen3ForSequenceClassification",
        "Qwen3ForCausalLM",
        "Qwen3ForConditionalGeneration",
    ]
    assert name_backbones("Qwen3ForCausalLM") == ["Qwen3ForCausalLM"]
    assert name_backbones("Model") == ["Model"]
    assert name_backbones("A", "LlamaModel")[:2] == ["A", "LlamaModel"]


def test_the_architecture_itself_comes_first() -> None:
    found = get_backbone_adapter("MixtralForCausalLM", ["LlamaForCausalLM"])
    assert type(found) is type(get_adapter("MixtralForCausalLM"))


def test_classes_are_listed_up_to_torchs_own() -> None:
    assert list_classes("Qwen2ForRewardModel") == ("Qwen2ForRewardModel", "Qwen2RewardBaseModel", "Qwen2Model")
    assert list_classes("NoSuchModel") == ()


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [
        ("DeepseekV3ForCausalLM", False),
        ("Qwen3ForSequenceClassification", False),
        ("LLaMAForCausalLM", False),  # served by Llama's very class
        ("Phi3ForCausalLM", True),
        ("MiMoForCausalLM", True),  # whose layers the adapter declines when they are loaded
        ("BertModel", False),  # without an adapter
    ],
)
def test_an_adapter_of_a_base_class_only_is_told_apart(architecture: str, expected: bool) -> None:
    assert is_derived(architecture) is expected
