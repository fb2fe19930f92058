"""What tests of pooling models ask of an engine, and the tiny models that they serve."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.support.vllm.engine import Engine
from tests.support.vllm.families import make_family

OPTIONS: dict[str, Any] = {"attention_backend": "CPU_ATTN", "runner": "pooling", "enable_prefix_caching": False}


def make_pooling(architecture: str, directory: Path, served_as: str, **config: Any) -> Path:
    """Write a tiny model of *architecture* whose config names the pooling architecture *served_as*; return its folder.

    Heads that the weights lack are added at random. *config* are further fields, which vLLM reads.
    """
    from safetensors.torch import load_file, save_file

    folder = make_family(architecture, directory)
    path, weights = folder / "config.json", folder / "model.safetensors"
    content = json.loads(path.read_text(encoding="utf-8")) | {"architectures": [served_as], **config}
    path.write_text(json.dumps(content), encoding="utf-8")
    tensors = load_file(weights)
    tensors.pop("lm_head.weight", None)
    hidden, generator = content["hidden_size"], torch.Generator().manual_seed(7)
    labels = len(content.get("id2label", ())) or 2
    if served_as.endswith("RewardModel"):
        labels = 2 if "Process" in served_as else 1
        shapes = {"0.weight": (hidden, hidden), "0.bias": (hidden,), "2.weight": (labels, hidden), "2.bias": (labels,)}
        heads = {f"score.{name}": shape for name, shape in shapes.items()}
    else:
        heads = {"score.weight": (labels, hidden)} if "Classification" in served_as else {}
    tensors |= {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in heads.items()}
    save_file(tensors, weights, metadata={"format": "pt"})
    return folder


def pool(engine: Engine, prompts: Sequence[Sequence[int]], task: str) -> list[torch.Tensor]:
    """Return what the pooler gives for each prompt of tokens, whichever task the engine was started for."""
    from vllm import PoolingParams

    inner, found = engine.llm.llm_engine, {}
    for number, prompt in enumerate(prompts):
        inner.add_request(str(number), {"prompt_token_ids": list(prompt)}, PoolingParams(task=task))
    while inner.has_unfinished_requests():
        for output in inner.step():
            found[int(output.request_id)] = output.outputs.data.clone()
    return [found[number] for number in range(len(prompts))]


def pool_cut(engine: Engine, cuts: Iterable[int], prompts: Sequence[Sequence[int]], task: str) -> list[torch.Tensor]:
    """Return the same with every step cut at these tokens, where it can be."""
    engine.configure()
    engine.cut_at(*cuts)
    try:
        return pool(engine, prompts, task)
    finally:
        engine.cut_by_settings()


def pool_unsplit(engine: Engine, prompts: Sequence[Sequence[int]], task: str) -> list[torch.Tensor]:
    """Return the same of vLLM's own steps."""
    engine.configure(DBO_MODE="off")
    try:
        return pool(engine, prompts, task)
    finally:
        engine.configure()
