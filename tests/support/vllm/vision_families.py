"""Tiny multimodal models with random weights, and what they are asked."""

from __future__ import annotations

import json
import math
import random
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from examples.tiny_pictures import ask
from tests.support.vllm.families import LINEAR

TINY = Path(__file__).parents[3] / "examples" / "tiny-qwen-vl"  # trained; whose tokenizer and processor all share
DEEPSEEK = TINY.with_name("tiny-deepseek")
QWEN25, QWEN3 = "Qwen2_5_VLForConditionalGeneration", "Qwen3VLForConditionalGeneration"
QWEN3_MOE = "Qwen3VLMoeForConditionalGeneration"
QWEN35, QWEN35_MOE = "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"
KIMI = "KimiK25ForConditionalGeneration"
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
ROTATION = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6], "mrope_interleaved": True}
TEXT = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
QWEN3_TEXT = {**TEXT, "vocab_size": 320, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 2048}
QWEN3_VISION = {
    "depth": 4,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_heads": 4,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 128,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0, 2],
}
QWEN35_VISION = {name: size for name, size in QWEN3_VISION.items() if name != "deepstack_visual_indexes"}
# Each token takes all experts: which ones, rounding in bfloat16 could decide.
SPARSE = {**LINEAR, **EXPERTS, "num_experts_per_tok": 4, "shared_expert_intermediate_size": 64}
PARTIAL = {**ROTATION, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25}
QWEN3_KINDS: dict[str, tuple[str, dict[str, Any]]] = {  # model type, and what the text config has besides
    QWEN3: ("qwen3_vl", {}),
    QWEN3_MOE: ("qwen3_vl_moe", EXPERTS),
    QWEN35: ("qwen3_5", {**LINEAR, "rope_parameters": PARTIAL}),
    QWEN35_MOE: ("qwen3_5_moe", {**SPARSE, "rope_parameters": PARTIAL}),
}


def make_vision_family(architecture: str, directory: Path, seed: int = 0) -> Path:
    """Write config, processor and random weights of a model of that architecture; return *directory*."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    shutil.copytree(TINY, directory, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
    if architecture in QWEN3_KINDS:
        _become_qwen3(directory, architecture)
    model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(directory), dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = noise / math.sqrt(parameter[0].numel()) if parameter.dim() > 1 else 1 + 0.1 * noise
    config = (directory / "config.json").read_text()
    model.save_pretrained(directory)
    (directory / "config.json").write_text(config)
    if architecture == QWEN3_MOE:
        _transpose_experts(directory / "model.safetensors")
    if architecture in (QWEN35, QWEN35_MOE):
        _name_encoder(directory / "model.safetensors")
    return directory


def make_kimi(directory: Path) -> Path:
    """Write a Kimi-K2.5 whose language model is the tiny DeepSeek, and which is served without its encoder."""
    shutil.copytree(DEEPSEEK, directory, ignore=shutil.ignore_patterns("*.safetensors"))
    text = json.loads((directory / "config.json").read_text())
    own = {"model_type": "kimi_k25", "architectures": [KIMI], "text_config": text, "media_placeholder_token_id": 3}
    vision = {"num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 64}
    own |= {"vision_config": vision, "dtype": text["dtype"], "tie_word_embeddings": False}
    (directory / "config.json").write_text(json.dumps(own))
    normal = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    pictures = {"patch_size": 14, "merge_kernel_size": 2, "temporal_merge_kernel_size": 4, **normal}
    (directory / "preprocessor_config.json").write_text(json.dumps({"media_proc_cfg": pictures}))
    weights = load_file(DEEPSEEK / "model.safetensors")
    named = {f"language_model.{name}": weight for name, weight in weights.items()}
    save_file(named, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def make_requests(kinds: tuple[int, ...], seed: int = 0) -> list[dict[str, Any]]:
    """Return a request for each of these numbers of pictures, in the words of vLLM."""
    rng = random.Random(seed)
    questions = [ask(rng, pictures) for pictures in kinds]
    return [
        {"prompt": each.prompt, **({"multi_modal_data": {"image": list(each.pictures)}} if each.pictures else {})}
        for each in questions
    ]


def _transpose_experts(file: Path) -> None:
    """Write matrices of experts as published weights have them [experts, in, out], and as vLLM expects them.

    transformers 5 writes them [experts, out, in].
    """
    weights = load_file(file)
    experts = {name: weight.transpose(1, 2).contiguous() for name, weight in weights.items() if ".experts." in name}
    save_file({**weights, **experts}, file, metadata={"format": "pt"})


def _name_encoder(file: Path) -> None:
    """Name the encoder's weights as published weights do. transformers 5.5 puts them into the language model."""
    named = {name.replace("language_model.visual.", "visual."): weight for name, weight in load_file(file).items()}
    save_file(named, file, metadata={"format": "pt"})


def _become_qwen3(directory: Path, architecture: str) -> None:
    config = json.loads((directory / "config.json").read_text())
    marks = {name: config[name] for name in config if name.endswith("_token_id")}
    model_type, more = QWEN3_KINDS[architecture]
    text = {**QWEN3_TEXT, "rope_parameters": ROTATION, **more}
    vision = QWEN3_VISION if architecture in (QWEN3, QWEN3_MOE) else QWEN35_VISION
    own = {"text_config": text, "vision_config": vision, **marks}
    own |= {"model_type": model_type, "architectures": [architecture], "tie_word_embeddings": False, "dtype": "float32"}
    (directory / "config.json").write_text(json.dumps(own, indent=2))
    for file in ("processor_config.json", "tokenizer_config.json"):
        content = (directory / file).read_text().replace("Qwen2_5_VLProcessor", "Qwen3VLProcessor")
        (directory / file).write_text(content.replace("Qwen2VLVideoProcessor", "Qwen3VLVideoProcessor"))
