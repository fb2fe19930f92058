"""Put faults into the tiny DeepSeek-V3, and count which of its answers stay right: how gross a fault must be to show.

Prints the table of the model card. Faults are put into both layers with experts, unless they say one.
"""

import argparse
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from tiny_tasks import KINDS, held_out
from train_tiny_deepseek import OUT, count_right
from transformers import AutoModelForCausalLM, AutoTokenizer, DeepseekV3ForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

Fault = Callable[[list[DeepseekV3MoE]], None]


def remove_routed(layers: list[DeepseekV3MoE]) -> None:
    """Let no routed expert add anything."""
    for layer in layers:
        layer.experts.down_proj.zero_()


def remove_shared(layers: list[DeepseekV3MoE]) -> None:
    """Let the shared expert add nothing."""
    for layer in layers:
        layer.shared_experts.down_proj.weight.zero_()


def swap_two(layers: list[DeepseekV3MoE]) -> None:
    """Let two experts of one layer compute each other's tokens."""
    for weight in (layers[0].experts.gate_up_proj, layers[0].experts.down_proj):
        weight[[0, 1]] = weight[[1, 0]]


def forget_scale(layers: list[DeepseekV3MoE]) -> None:
    """Add what routed experts compute unscaled."""
    for layer in layers:
        layer.experts.down_proj.div_(layer.config.routed_scaling_factor)


def forget_bias(layers: list[DeepseekV3MoE]) -> None:
    """Choose experts without the bias that balances them."""
    for layer in layers:
        layer.gate.e_score_correction_bias.zero_()


def remove_one(layers: list[DeepseekV3MoE]) -> None:
    """Let one expert of one layer add nothing."""
    layers[0].experts.down_proj[0].zero_()


FAULTS: dict[str, Fault] = {
    "routed experts missing": remove_routed,
    "shared expert missing": remove_shared,
    "two experts swapped in one layer": swap_two,
    "routed experts not scaled by 2.5": forget_scale,
    "balancing bias missing": forget_bias,
    "one expert missing in one layer": remove_one,
}


def load(folder: Path) -> DeepseekV3ForCausalLM:
    """Load the model in fp32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def put(fault: Fault, model: DeepseekV3ForCausalLM) -> None:
    """Put a fault into the model's layers with experts."""
    fault([layer.mlp for layer in model.model.layers if isinstance(layer.mlp, DeepseekV3MoE)])


def describe(name: str, right: Counter[str], asked: int) -> str:
    """Return the row of a fault."""
    counts = " | ".join(str(right[kind]) for kind in KINDS)
    return f"| {name} | {counts} | {right.total() / asked:.1%} |"


def main() -> None:
    """Print the table, fault by fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--per-kind", type=int, default=900, help="held-out tasks of each kind (default: %(default)s)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the matrices are too small to share out
    tokenizer, tasks = AutoTokenizer.from_pretrained(OUT), held_out(arguments.per_kind)
    print(f"| fault | {' | '.join(KINDS)} | all |\n|{'---|' * (len(KINDS) + 2)}")
    for name, fault in FAULTS.items():
        model = load(OUT)
        put(fault, model)
        print(describe(name, count_right(model, tokenizer, tasks), len(tasks)), flush=True)


if __name__ == "__main__":
    main()
