"""Tiny Gemma 4, InternVL and Qwen3-Omni, whose configs are made of other classes than those of vision_families.py."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.support.vllm.families import make_family
from tests.support.vllm.vision_families import EXPERTS, QWEN3_TEXT, QWEN3_VISION, ROTATION, TINY

GEMMA4, INTERNVL = "Gemma4ForConditionalGeneration", "InternVLChatModel"
OMNI = "Qwen3OmniMoeForConditionalGeneration"
CONFIG_CLASS = Path(__file__).with_name("configuration_internvl_chat.py")
INTERN_VISION = {
    "model_type": "intern_vit_6b",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "hidden_act": "gelu",
    "norm_type": "layer_norm",
    "layer_norm_eps": 1e-6,
    "qkv_bias": True,
    "qk_normalization": False,
    "initializer_factor": 0.1,
    "num_channels": 3,
}
INTERN = {
    "architectures": [INTERNVL],
    "model_type": "internvl_chat",
    "auto_map": {"AutoConfig": "configuration_internvl_chat.InternVLChatConfig"},
    "force_image_size": 28,
    "downsample_ratio": 0.5,
    "ps_version": "v2",
    "select_layer": -1,
    "tie_word_embeddings": False,
}
OMNI_VISION = {**QWEN3_VISION, "image_size": 112, "apply_vit_abs_pos_embed": True}
AUDIO = {
    "d_model": 64,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "downsample_hidden_size": 16,
    "output_dim": 128,
}
TOKENS = {  # of the tiny tokenizer, which has none for audio
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
    "audio_token": "<|endoftext|>",
    "audio_bos_token": "<|endoftext|>",
    "audio_eos_token": "<|endoftext|>",
}


def make_internvl(directory: Path, language: str) -> Path:
    """Write an InternVL whose language model is of that family, and which is served without its encoder."""
    make_family(language, directory)
    weights = load_file(directory / "model.safetensors")
    named = {f"language_model.{name}": weight for name, weight in weights.items()}
    save_file(named, directory / "model.safetensors", metadata={"format": "pt"})
    text = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    config = {**INTERN, "llm_config": text, "vision_config": INTERN_VISION, "torch_dtype": "bfloat16"}
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    shutil.copy(CONFIG_CLASS, directory)
    return directory


def make_gemma4(directory: Path) -> Path:
    """Write a Gemma 4 with experts, which is served without its encoders."""
    make_family("Gemma4ForCausalLM", directory)
    weights = load_file(directory / "model.safetensors")
    named = {name.replace("model.", "model.language_model.", 1): weight for name, weight in weights.items()}
    save_file(named, directory / "model.safetensors", metadata={"format": "pt"})
    text = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    config = {"model_type": "gemma4", "architectures": [GEMMA4], "text_config": text, "vision_config": {}}
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


def make_omni(directory: Path, seed: int = 0) -> Path:
    """Write the thinker of a Qwen3-Omni, with encoders, and with the processor of the tiny Qwen2.5-VL's pictures."""
    from transformers import AutoConfig, Qwen3OmniMoeThinkerForConditionalGeneration

    shutil.copytree(TINY, directory, ignore=shutil.ignore_patterns("*.safetensors"))
    marks = json.loads((TINY / "config.json").read_text(encoding="utf-8"))
    marks = {name: marks[name] for name in ("image_token_id", "video_token_id", "vision_start_token_id")}
    text = {**QWEN3_TEXT, **EXPERTS, "rope_parameters": ROTATION, "tie_word_embeddings": False}
    thinker = {**marks, "text_config": text, "vision_config": OMNI_VISION, "audio_config": AUDIO}
    thinker |= {"audio_token_id": 0, "audio_start_token_id": 0, "tie_word_embeddings": False}
    config = AutoConfig.for_model("qwen3_omni_moe", thinker_config=thinker, enable_audio_output=False)
    config.architectures = [OMNI]
    model = Qwen3OmniMoeThinkerForConditionalGeneration(config.thinker_config)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = noise / math.sqrt(parameter[0].numel()) if parameter.dim() > 1 else 1 + 0.1 * noise
    model.save_pretrained(directory)
    weights = load_file(directory / "model.safetensors")
    named = {f"thinker.{name}": weight for name, weight in weights.items()}
    save_file(named, directory / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(directory)
    _become_omni(directory)
    return directory


def _become_omni(directory: Path) -> None:
    processor = json.loads((directory / "processor_config.json").read_text(encoding="utf-8"))
    processor |= {"processor_class": "Qwen3OmniMoeProcessor"}
    processor |= {"feature_extractor": {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 128}}
    (directory / "processor_config.json").write_text(json.dumps(processor), encoding="utf-8")
    tokenizer = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
    tokenizer |= {"processor_class": "Qwen3OmniMoeProcessor", "extra_special_tokens": TOKENS}
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer), encoding="utf-8")
