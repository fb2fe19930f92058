"""Makes a DeepSeek-V3 of any size with real random weights: for timing, where what it says does not matter.

vLLM's own dummy weights are so small that the output does not depend on attention; these are scaled to keep activations
alive, so that results can be compared, too.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

TINY = Path(__file__).parent / "tiny-deepseek"
CONTEXT = 8192  # positions: nothing was learnt of them, so they can be as many as one likes


def make_checkpoint(directory: Path, hidden: int = 256, layers: int = 4, heads: int = 8, seed: int = 0) -> Path:
    """Write config, tokenizer (the tiny model's) and weights for a model of these sizes; return *directory*."""
    directory.mkdir(parents=True, exist_ok=True)
    for file in TINY.glob("tokenizer*"):
        shutil.copy(file, directory)
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps({**settings, "model_max_length": CONTEXT}, indent=2))
    config = json.loads((TINY / "config.json").read_text())
    config.update(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        intermediate_size=2 * hidden,
        moe_intermediate_size=hidden // 2,
        q_lora_rank=hidden // 2,
        qk_nope_head_dim=128,
        qk_head_dim=128 + config["qk_rope_head_dim"],
        v_head_dim=128,
        max_position_embeddings=CONTEXT,
    )
    config["rope_parameters"]["original_max_position_embeddings"] = CONTEXT
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    generator = torch.Generator().manual_seed(seed)
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in _make_weights(config, generator)}
    bias = {n: torch.randn(w.shape[0], generator=generator) * 0.1 for n, w in weights.items() if "mlp.gate.weight" in n}
    for name, value in bias.items():
        weights[name.replace("weight", "e_score_correction_bias")] = value  # the router's bias stays fp32
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def _make_weights(config: dict[str, Any], generator: torch.Generator) -> Iterator[tuple[str, torch.Tensor]]:
    def matrix(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * (gain / columns**0.5)

    def norm(size: int) -> torch.Tensor:
        return 1 + 0.1 * torch.randn(size, generator=generator)

    def mlp(prefix: str, inner: int) -> Iterator[tuple[str, torch.Tensor]]:
        yield f"{prefix}.gate_proj.weight", matrix(inner, hidden)
        yield f"{prefix}.up_proj.weight", matrix(inner, hidden)
        yield f"{prefix}.down_proj.weight", matrix(hidden, inner, 2.0)

    hidden, heads, q_rank, kv_rank = (
        config[k] for k in ("hidden_size", "num_attention_heads", "q_lora_rank", "kv_lora_rank")
    )
    rope, nope, v_dim = (config[k] for k in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"))
    yield "model.embed_tokens.weight", torch.randn(config["vocab_size"], hidden, generator=generator)
    yield "model.norm.weight", norm(hidden)
    yield "lm_head.weight", matrix(config["vocab_size"], hidden, 2.0)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", norm(hidden)
        yield f"{prefix}.post_attention_layernorm.weight", norm(hidden)
        attention = f"{prefix}.self_attn"
        yield f"{attention}.q_a_proj.weight", matrix(q_rank, hidden, 1.5)
        yield f"{attention}.q_a_layernorm.weight", norm(q_rank)
        yield f"{attention}.q_b_proj.weight", matrix(heads * (nope + rope), q_rank, 1.5)
        yield f"{attention}.kv_a_proj_with_mqa.weight", matrix(kv_rank + rope, hidden, 1.5)
        yield f"{attention}.kv_a_layernorm.weight", norm(kv_rank)
        yield f"{attention}.kv_b_proj.weight", matrix(heads * (nope + v_dim), kv_rank, 1.5)
        yield f"{attention}.o_proj.weight", matrix(hidden, heads * v_dim, 3.0)
        if layer < config["first_k_dense_replace"]:
            yield from mlp(f"{prefix}.mlp", config["intermediate_size"])
            continue
        yield f"{prefix}.mlp.gate.weight", matrix(config["n_routed_experts"], hidden, 2.0)
        yield from mlp(f"{prefix}.mlp.shared_experts", config["moe_intermediate_size"] * config["n_shared_experts"])
        for expert in range(config["n_routed_experts"]):
            yield from mlp(f"{prefix}.mlp.experts.{expert}", config["moe_intermediate_size"])


def main() -> None:
    """Make one from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="directory to write the checkpoint to")
    parser.add_argument("--hidden", type=int, default=256, help="hidden size (default: 256)")
    parser.add_argument("--layers", type=int, default=4, help="number of layers, the first of them dense (default: 4)")
    parser.add_argument("--heads", type=int, default=8, help="number of attention heads (default: 8)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights (default: 0)")
    arguments = parser.parse_args()
    make_checkpoint(arguments.out, arguments.hidden, arguments.layers, arguments.heads, arguments.seed)


if __name__ == "__main__":
    main()
