"""Train two drafters for the tiny DeepSeek-V3, on one CPU core, in a few minutes each.

Drafters propose tokens that the model then verifies, several at once (speculative decoding). Trained on the model's own
tasks, most of their drafts are right, so that served requests accept and reject drafts as real ones do. One is a layer
for multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2), the other an Eagle3 head (arXiv:2503.01840), in
the formats that vLLM loads. The model itself stays as it is.

Both get, at position i, token i+1 and what the model has computed at position i, and predict token i+2; then, for the
next drafts, their own result in place of the model's. Training does the same for as many drafts as are to be made.
"""

import argparse
import copy
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tiny_tasks import held_out, training_stream
from tiny_tokenizer import IGNORED, encode
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from train_tiny_deepseek import (
    BALANCE_END,
    BALANCE_RATE,
    OUT,
    TRAINED,
    ExpertBalancer,
    build_optimizers,
    draw_batch,
    schedule_rate,
    widen,
)
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3Attention,
    DeepseekV3DecoderLayer,
    DeepseekV3MLP,
    DeepseekV3RMSNorm,
)

DRAFTS = 3  # tokens that are drafted one after the other
READ_LAYERS = (1, 2, 3)  # after how many layers of the model Eagle3 reads its hidden states
PREDICTED = 2  # a position predicts the second token after it: the model itself predicts the first


class MtpLayer(nn.Module):
    """One more decoder layer, which reads the model's last hidden states and shares its embedding and its head."""

    def __init__(self, model: DeepseekV3ForCausalLM, config: DeepseekV3Config) -> None:
        super().__init__()
        self.enorm, self.hnorm, self.norm = (DeepseekV3RMSNorm(config.hidden_size) for _ in range(3))
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.block = DeepseekV3DecoderLayer(config, layer_idx=config.num_hidden_layers)
        self.head: Callable[[Tensor], Tensor] = model.lm_head.forward  # not a module of this one: it is not trained

    def start(self, read: list[Tensor]) -> Tensor:
        """Return what the first draft is made from, given hidden states after each layer and after the norm."""
        return read[-1]

    def forward(self, embedded: Tensor, hidden: Tensor, rotary: Any, start: int) -> tuple[Tensor, Tensor]:
        """Return logits [tasks, positions, vocabulary], and the hidden states that the next drafts are made from."""
        if start == 0:
            embedded = embedded.clone()
            embedded[:, 0] = 0  # as vLLM has it
        x = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1))
        normed = self.norm(self.block(x, position_embeddings=rotary))
        return self.head(normed), normed

    def describe(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return what vLLM reads from config.json, given that of the model."""
        return {**config, "num_nextn_predict_layers": 1}

    def name_weights(self, layer: int) -> dict[str, Tensor]:
        """Return the weights by DeepSeek-V3's names."""
        prefix = f"model.layers.{layer}."
        weights = {}
        for name, weight in self.state_dict().items():
            if name.endswith("experts.gate_up_proj"):
                for number, expert in enumerate(weight):
                    gate, up = expert.chunk(2)
                    weights[f"{prefix}mlp.experts.{number}.gate_proj.weight"] = gate
                    weights[f"{prefix}mlp.experts.{number}.up_proj.weight"] = up
            elif name.endswith("experts.down_proj"):
                for number, expert in enumerate(weight):
                    weights[f"{prefix}mlp.experts.{number}.down_proj.weight"] = expert
            else:
                own = "shared_head.norm.weight" if name == "norm.weight" else name.removeprefix("block.")
                weights[prefix + own] = weight
        return weights


class Eagle3Head(nn.Module):
    """A dense layer and a head of its own, which reads the model's hidden states after several layers."""

    def __init__(self, model: DeepseekV3ForCausalLM, config: DeepseekV3Config) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.fc = nn.Linear(len(READ_LAYERS) * hidden, hidden, bias=False)
        wide = type(config)(**{**config.to_dict(), "hidden_size": 2 * hidden})  # it attends with token and hidden state
        wide._attn_implementation = config._attn_implementation
        self.self_attn = DeepseekV3Attention(wide, layer_idx=config.num_hidden_layers)
        self.self_attn.o_proj = nn.Linear(config.num_attention_heads * config.v_head_dim, hidden, bias=False)
        self.mlp = DeepseekV3MLP(config)
        names = ("input_layernorm", "hidden_norm", "post_attention_layernorm", "norm")
        for name in names:
            setattr(self, name, DeepseekV3RMSNorm(hidden))
        self.lm_head = nn.Linear(hidden, config.vocab_size, bias=False)
        self.lm_head.load_state_dict(model.lm_head.state_dict())

    def start(self, read: list[Tensor]) -> Tensor:
        """Return what the first draft is made from, given hidden states after each layer and after the norm."""
        combined: Tensor = self.fc(torch.cat([read[layers - 1] for layers in READ_LAYERS], dim=-1))
        return combined

    def forward(self, embedded: Tensor, hidden: Tensor, rotary: Any, start: int) -> tuple[Tensor, Tensor]:
        """Return logits [tasks, positions, vocabulary], and the hidden states that the next drafts are made from."""
        x = torch.cat([self.input_layernorm(embedded), self.hidden_norm(hidden)], dim=-1)
        hidden = hidden + self.self_attn(x, position_embeddings=rotary, attention_mask=None)[0]
        hidden = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return self.lm_head(self.norm(hidden)), hidden

    def describe(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return what vLLM reads from config.json, given that of the model.

        The type is DeepSeek-V2's: vLLM takes every drafter of V3's type for an MTP layer.
        """
        own = {
            "model_type": "deepseek_v2",
            "architectures": ["Eagle3DeepseekV2ForCausalLM"],
            "num_hidden_layers": 1,
            "draft_vocab_size": config["vocab_size"],
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(READ_LAYERS)},
        }
        return {**config, **own}

    def name_weights(self, layer: int) -> dict[str, Tensor]:
        """Return the weights by the names of published heads."""
        outside = ("fc.", "norm.", "lm_head.")
        return {name if name.startswith(outside) else f"midlayer.{name}": w for name, w in self.state_dict().items()}


DRAFTERS = {"mtp": MtpLayer, "eagle3": Eagle3Head}
Drafter = MtpLayer | Eagle3Head


@torch.no_grad()
def read_hidden(model: DeepseekV3ForCausalLM, inputs: Tensor) -> list[Tensor]:
    """Return the model's hidden states after each layer and after its norm, each [tasks, positions, hidden]."""
    read: list[Tensor] = []
    hooks = [layer.register_forward_hook(lambda _module, _given, out: read.append(out)) for layer in model.model.layers]
    try:
        last = model.model(input_ids=inputs, use_cache=False).last_hidden_state
    finally:
        for hook in hooks:
            hook.remove()
    return [*read, last]


def draft(
    drafter: Drafter, model: DeepseekV3ForCausalLM, inputs: Tensor, targets: Tensor
) -> list[tuple[Tensor, Tensor]]:
    """Return logits and targets of each of the drafts [drafts][tasks, positions, ...].

    Only what follows the first token of an answer has a target: that one the model gives itself.
    """
    hidden = drafter.start(read_hidden(model, inputs))
    later = targets.masked_fill(nn.functional.pad(targets, (1, 0), value=IGNORED)[:, :-1] == IGNORED, IGNORED)
    made = []
    for number in range(DRAFTS):
        embedded = model.model.embed_tokens(inputs[:, number + 1 :])
        count = embedded.shape[1]
        rotary = model.model.rotary_emb(embedded, torch.arange(number, number + count)[None])
        logits, hidden = drafter(embedded, hidden[:, :count], rotary, number)
        made.append((logits, later[:, number + 1 :]))
    return made


def compute_gradients(drafter: Drafter, model: DeepseekV3ForCausalLM, batch: list[tuple[Tensor, Tensor]]) -> float:
    """Add up the gradients of the batch's mean loss per drafted token, and return that loss."""
    total = 0.0
    for inputs, targets in batch:
        with torch.autocast("cpu", torch.bfloat16):
            made = draft(drafter, model, inputs, targets)
        loss = sum(
            nn.functional.cross_entropy(logits.float().flatten(0, 1), wanted.flatten(), ignore_index=IGNORED)
            for logits, wanted in made
        ) / (DRAFTS * len(batch))
        loss.backward()  # type: ignore[union-attr]  # a sum of tensors, which starts as the number 0
        total += loss.item()
    return total


def train(
    drafter: Drafter, model: DeepseekV3ForCausalLM, tokenizer: PreTrainedTokenizerFast, steps: int, seed: int
) -> None:
    """Train the drafter in place and print its progress."""
    optimizers = build_optimizers(drafter)
    schedules = [LambdaLR(optimizer, lambda step: schedule_rate(step, steps)) for optimizer in optimizers]
    balancer = ExpertBalancer(drafter)
    stream = training_stream(seed)
    start = time.monotonic()
    for step in range(steps):
        loss = compute_gradients(drafter, model, draw_batch(tokenizer, stream))
        nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        if step < steps * BALANCE_END:
            balancer.update(BALANCE_RATE * schedule_rate(step, steps))
        if (step + 1) % 100 == 0 or step + 1 == steps:
            print(f"step {step + 1}: loss {loss:.4f}, {time.monotonic() - start:.0f} s", flush=True)


def initialize(drafter: Drafter, deviation: float) -> None:
    """Draw the weights that are matrices; norms start at one, and what was copied from the model stays."""
    for name, parameter in drafter.named_parameters():
        if parameter.ndim > 1 and name != "lm_head.weight":
            nn.init.normal_(parameter, std=deviation)


@torch.no_grad()
def measure_accuracy(
    drafter: Drafter, model: DeepseekV3ForCausalLM, tokenizer: PreTrainedTokenizerFast, per_kind: int
) -> list[float]:
    """Return the share of held-out answers' tokens that each of the drafts predicts, given the right ones before."""
    right, all_of_them = [0] * DRAFTS, [0] * DRAFTS
    for number, (logits, wanted) in enumerate(draft(drafter, model, *encode(tokenizer, held_out(per_kind)))):
        answered = wanted != IGNORED
        right[number] += int((logits.argmax(-1) == wanted)[answered].sum())
        all_of_them[number] += int(answered.sum())
    return [one / count for one, count in zip(right, all_of_them, strict=True)]


def save(drafter: Drafter, model: DeepseekV3ForCausalLM, folder: Path) -> None:
    """Save the drafter as vLLM loads it, widened like the model, its weights in bf16; the router bias stays in fp32."""
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((OUT / "config.json").read_text(encoding="utf-8"))
    text = json.dumps(drafter.describe(config), indent=2, sort_keys=True)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")
    weights = widen(drafter.name_weights(model.config.num_hidden_layers))
    save_file(
        {
            name: (weight if "correction_bias" in name else weight.to(torch.bfloat16)).contiguous()
            for name, weight in weights.items()
        },
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafter", choices=DRAFTERS, help="which to train")
    parser.add_argument("--steps", type=int, default=240, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and training tasks (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="folder for the drafter (default: next to the model's)")
    parser.add_argument("--per-kind", type=int, default=100, help="held-out tasks per kind (default: %(default)s)")
    return parser.parse_args()


def main() -> None:
    """Train, save and test one drafter."""
    arguments = parse_arguments()
    torch.set_num_threads(1)  # the matrices are too small to share out
    torch.manual_seed(arguments.seed)
    tokenizer = AutoTokenizer.from_pretrained(OUT)
    model = AutoModelForCausalLM.from_pretrained(OUT, dtype=torch.float32).requires_grad_(requires_grad=False).eval()
    config = copy.deepcopy(model.config)
    config.update(TRAINED)
    drafter = DRAFTERS[arguments.drafter](model, config)
    initialize(drafter, model.config.initializer_range)
    print(f"{sum(parameter.numel() for parameter in drafter.parameters()):,} parameters", flush=True)
    train(drafter, model, tokenizer, arguments.steps, arguments.seed)
    save(drafter, model, arguments.out or OUT.with_name(f"{OUT.name}-{arguments.drafter}"))
    shares = measure_accuracy(drafter, model, tokenizer, arguments.per_kind)
    print("held-out tokens that are drafted right:", ", ".join(f"{share:.1%}" for share in shares))


if __name__ == "__main__":
    main()
