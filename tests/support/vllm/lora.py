"""LoRA adapters of random weights."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.support.vllm.families import LAYERS

RANK = 4
HIDDEN, INTERMEDIATE, QUERIES, KEYS = 128, 256, 128, 64
SHAPES = {  # of the projections that adapters change: inputs and outputs
    "self_attn.q_proj": (HIDDEN, QUERIES),
    "self_attn.k_proj": (HIDDEN, KEYS),
    "self_attn.v_proj": (HIDDEN, KEYS),
    "self_attn.o_proj": (QUERIES, HIDDEN),
    "mlp.gate_proj": (HIDDEN, INTERMEDIATE),
    "mlp.up_proj": (HIDDEN, INTERMEDIATE),
    "mlp.down_proj": (INTERMEDIATE, HIDDEN),
}


def make_lora(folder: Path, seed: int) -> Path:
    """Write an adapter of random weights that changes every projection, in PEFT's form."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(LAYERS):
        for name, (inputs, outputs) in SHAPES.items():
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            weights[f"{prefix}.lora_A.weight"] = torch.randn(RANK, inputs, generator=generator) / inputs**0.5
            weights[f"{prefix}.lora_B.weight"] = torch.randn(outputs, RANK, generator=generator) / RANK**0.5
    save_file(weights, folder / "adapter_model.safetensors")
    projections = [name.partition(".")[2] for name in SHAPES]
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": projections, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
