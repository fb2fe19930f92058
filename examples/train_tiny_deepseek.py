"""Train a tiny DeepSeek-V3 from scratch, on one CPU core, in under 15 minutes.

The model has every part of DeepSeek-V3 that serving must get right (latent attention with a compressed cache, YaRN,
grouped routing with a balancing bias, a shared expert, a dense first layer) in 1.4 million parameters, and it *knows*
something: the tasks of ``tiny_tasks``, whose answers are exact. A gross fault in the serving path then shows as wrong
answers. A subtle one, such as a single missing expert, hardly does: compare log-probabilities (see the model card).
It is saved with 0.9 million zeros more, which make heads as wide as vLLM needs them on CUDA.

The seed reproduces the accuracy, not the bits: matrix products are summed in another order on another machine.
"""

import argparse
import itertools
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tiny_tasks import KINDS, Task, held_out, training_stream
from tiny_tokenizer import EOS, IGNORED, PAD, build_tokenizer, encode
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM, PreTrainedTokenizerFast
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

OUT = Path(__file__).parent / "tiny-deepseek"
CONTEXT = 4096  # positions
HEADS = 4  # of attention
TRAINED = {"qk_nope_head_dim": 32, "v_head_dim": 32}  # sizes of a head: the tasks need no larger ones
SAVED = {"qk_nope_head_dim": 64, "v_head_dim": 128}  # the smallest that FlashAttention's prefill takes on CUDA
BATCH = 192  # tasks of one optimizer step
CHUNK = 64  # tasks that are padded to one length
LONGEST_ANSWER = 10  # tokens: 8 letters, the end, and one more so that a wrong answer can run on

ADAMW_RATE = 3e-3
MUON_RATE = 4e-3
WEIGHT_DECAY = 0.05
WARMUP_STEPS = 60
DECAY_START = 0.55  # of all steps
BALANCE_RATE = 1e-2  # change of a router bias in one step
BALANCE_END = 0.9  # of all steps

# What every token passes through learns more slowly. Else the shared expert and the dense layer learn the tasks alone,
# and a fault in the routed experts would leave all answers right; far slower still, and the shared expert would idle.
SHARED_EXPERT_PACE = 0.4
DENSE_LAYER_PACE = 0.3


def describe_rotary_embedding() -> dict[str, Any]:
    """Describe YaRN (arXiv:2309.00071) with factor 1, which rotates exactly as the plain rotary embedding.

    Only its name matters: vLLM's CPU kernel for the plain one misreads latent attention's 3-D queries.
    """
    return {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 1.0,
        "original_max_position_embeddings": CONTEXT,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }


def describe_experts() -> dict[str, Any]:
    """Describe the experts and their routing: the best two of eight, both from the better one of two groups."""
    return {
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "moe_intermediate_size": 64,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    }


def build_config(sizes: dict[str, int]) -> DeepseekV3Config:
    """Describe the model with heads of these sizes: DeepSeek-V3 (arXiv:2412.19437) made small.

    The latent and the rotary width keep their real sizes, 512 and 64, because attention kernels are written for them.
    """
    return DeepseekV3Config(
        vocab_size=320,  # 259 tokens, rounded up to the multiple of 64 to which vLLM pads
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        q_lora_rank=64,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        rope_parameters=describe_rotary_embedding(),
        max_position_embeddings=CONTEXT,
        initializer_range=0.05,
        pad_token_id=2,
        num_mtp_layers=0,  # config.json calls it num_nextn_predict_layers
        **sizes,
        **describe_experts(),
    )


def build_model() -> DeepseekV3ForCausalLM:
    """Build the untrained model; its shared experts start as quiet as they learn slowly."""
    model = DeepseekV3ForCausalLM(build_config(TRAINED))
    for name, parameter in model.named_parameters():
        if name.endswith("shared_experts.down_proj.weight"):
            parameter.data.mul_(SHARED_EXPERT_PACE)
    return model


def scale_learning_rate(name: str) -> float:
    """Give the learning rate of a parameter, relative to that of its optimizer."""
    if "shared_experts" in name:
        return SHARED_EXPERT_PACE
    if "layers.0.mlp" in name:
        return DENSE_LAYER_PACE
    return 1.0


def build_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Build Muon for the matrices from hidden units to hidden units and AdamW for all else, a group per parameter.

    Muon (https://kellerjordan.github.io/posts/muon/) makes every update an orthogonal matrix. Its rate is scaled to
    the size of an AdamW update (arXiv:2502.16982), so that one weight decay and one schedule fit both.
    """
    muon, adamw = [], []
    for name, parameter in model.named_parameters():
        scale = scale_learning_rate(name)
        if parameter.ndim == 2 and not name.endswith(("embed_tokens.weight", "lm_head.weight", "gate.weight")):
            muon.append({"params": [parameter], "lr": MUON_RATE * scale})
        else:
            decay = 0.0 if parameter.ndim == 1 else WEIGHT_DECAY  # a norm's scale has no reason to be small
            adamw.append({"params": [parameter], "lr": ADAMW_RATE * scale, "weight_decay": decay})
    return [
        torch.optim.Muon(muon, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(adamw, betas=(0.9, 0.98), eps=1e-9),
    ]


def schedule_rate(step: int, steps: int) -> float:
    """Give the learning rate at a step, relative to its peak: it rises, stays and falls in straight lines."""
    return min((step + 1) / WARMUP_STEPS, 1.0, (1 - step / steps) / (1 - DECAY_START))


class ExpertBalancer:
    """Spreads the tokens over the experts without an auxiliary loss (arXiv:2408.15664; DeepSeek-V3, section 2.1.2).

    After each step the routing bias of an expert with more tokens than the mean goes down by a fixed amount, and that
    of an expert with fewer goes up. The bias chooses experts; it does not enter their weights in the sum.
    """

    def __init__(self, model: nn.Module) -> None:
        routers = [module for module in model.modules() if isinstance(module, DeepseekV3TopkRouter)]
        self.load = {router: torch.zeros(router.num_experts) for router in routers}  # tokens of each expert, [experts]
        for router in routers:
            router.register_forward_hook(self.count)

    def count(self, router: DeepseekV3TopkRouter, _inputs: object, output: tuple[Tensor, Tensor, Tensor]) -> None:
        """Add the tokens of one forward pass; ``output`` ends with the chosen experts, [tokens, experts per token]."""
        self.load[router] += torch.bincount(output[2].flatten(), minlength=router.num_experts)

    def update(self, rate: float) -> None:
        """Move every bias by ``rate`` towards balance and start counting anew."""
        for router, load in self.load.items():
            router.e_score_correction_bias.add_(torch.sign(load.mean() - load), alpha=rate)
            load.zero_()


def draw_batch(tokenizer: PreTrainedTokenizerFast, stream: Iterator[Task]) -> list[tuple[Tensor, Tensor]]:
    """Draw the tasks of one step, encoded in chunks of similar length, which wastes little on padding."""
    tasks = sorted(itertools.islice(stream, BATCH), key=lambda task: len(task.prompt + task.answer))
    return [encode(tokenizer, tasks[start : start + CHUNK]) for start in range(0, BATCH, CHUNK)]


def compute_gradients(model: DeepseekV3ForCausalLM, batch: list[tuple[Tensor, Tensor]]) -> float:
    """Add up the gradients of the batch's mean loss per answer token, and return that loss."""
    answer_tokens = sum(int((targets != IGNORED).sum()) for _, targets in batch)
    total = 0.0
    for inputs, targets in batch:
        with torch.autocast("cpu", torch.bfloat16):
            hidden = model.model(input_ids=inputs, use_cache=False).last_hidden_state
            answered = targets != IGNORED
            logits = model.lm_head(hidden[answered])  # only where there is a loss, [answer tokens, vocabulary]
        loss = nn.functional.cross_entropy(logits.float(), targets[answered], reduction="sum") / answer_tokens
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        total += loss.item()
    return total


def train(model: DeepseekV3ForCausalLM, tokenizer: PreTrainedTokenizerFast, steps: int, seed: int) -> None:
    """Train the model in place and print its progress."""
    optimizers = build_optimizers(model)
    schedules = [LambdaLR(optimizer, lambda step: schedule_rate(step, steps)) for optimizer in optimizers]
    balancer = ExpertBalancer(model)
    stream = training_stream(seed)
    start = time.monotonic()
    model.train()
    for step in range(steps):
        loss = compute_gradients(model, draw_batch(tokenizer, stream))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        if step < steps * BALANCE_END:  # the last steps train with the bias that is saved
            balancer.update(BALANCE_RATE * schedule_rate(step, steps))
        if (step + 1) % 100 == 0 or step + 1 == steps:
            print(f"step {step + 1}: loss {loss:.4f}, {time.monotonic() - start:.0f} s", flush=True)


def widen(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Fill the heads of attention up with zeros, from the sizes of ``TRAINED`` to those of ``SAVED``.

    The result computes the same: queries grow as the scale of the scores, (size of a query) ** -0.5, shrinks.
    """
    keys, values = (SAVED[name] - TRAINED[name] for name in ("qk_nope_head_dim", "v_head_dim"))
    growth = (build_config(SAVED).qk_head_dim / build_config(TRAINED).qk_head_dim) ** 0.5
    wide = dict(weights)
    for name, weight in weights.items():
        if name.endswith(".q_b_proj.weight"):  # rows of a head: not rotated, rotated
            wide[name] = growth * nn.functional.pad(weight.unflatten(0, (HEADS, -1)), (0, 0, keys, 0)).flatten(0, 1)
        elif name.endswith(".kv_b_proj.weight"):  # rows of a head: key, value
            wide[name] = nn.functional.pad(weight.unflatten(0, (HEADS, -1)), (0, 0, keys, values)).flatten(0, 1)
        elif name.endswith(".o_proj.weight"):  # columns of a head: value
            wide[name] = nn.functional.pad(weight.unflatten(1, (HEADS, -1)), (0, values)).flatten(1)
    return wide


def save(model: DeepseekV3ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Save the model, widened, with its weights in bf16; the router bias is a buffer and stays in fp32."""
    wide = DeepseekV3ForCausalLM(build_config(SAVED))
    wide.load_state_dict(widen(model.state_dict()))
    for parameter in wide.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    wide.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@torch.no_grad()
def answer(model: DeepseekV3ForCausalLM, tokenizer: PreTrainedTokenizerFast, prompts: list[str]) -> list[str]:
    """Answer prompts of one length greedily; a finished answer ends with ``</s>``."""
    encoded = tokenizer(prompts, return_tensors="pt")  # [prompts, prompt tokens]
    generated = model.generate(**encoded, max_new_tokens=LONGEST_ANSWER, do_sample=False)
    return [text.replace(PAD, "") for text in tokenizer.batch_decode(generated[:, encoded.input_ids.shape[1] :])]


def count_right(model: DeepseekV3ForCausalLM, tokenizer: PreTrainedTokenizerFast, tasks: list[Task]) -> Counter[str]:
    """Count, by kind, the tasks that the model answers exactly."""
    by_length: dict[int, list[Task]] = defaultdict(list)  # prompts of one length need no padding
    for task in tasks:
        by_length[len(task.prompt)].append(task)
    correct: Counter[str] = Counter()
    for group in by_length.values():
        answers = answer(model, tokenizer, [task.prompt for task in group])
        correct.update(task.kind for task, text in zip(group, answers, strict=True) if text == task.answer + EOS)
    return correct


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1600, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and training tasks (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=OUT, help="folder for the model (default: %(default)s)")
    parser.add_argument("--per-kind", type=int, default=900, help="held-out tasks per kind (default: %(default)s)")
    return parser.parse_args()


def main() -> None:
    """Train, save and test the model."""
    arguments = parse_arguments()
    torch.set_num_threads(1)  # the matrices are too small to share out
    torch.manual_seed(arguments.seed)
    tokenizer, model = build_tokenizer(CONTEXT), build_model()
    print(f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters", flush=True)
    train(model, tokenizer, arguments.steps, arguments.seed)
    save(model, tokenizer, arguments.out)
    saved = AutoModelForCausalLM.from_pretrained(arguments.out, dtype=torch.float32).eval()
    correct = count_right(saved, tokenizer, held_out(arguments.per_kind))
    for kind in KINDS:
        print(f"{kind}: {correct[kind]} of {arguments.per_kind} held-out tasks right")
    print(f"held-out accuracy: {correct.total() / (arguments.per_kind * len(KINDS)):.2%}")


if __name__ == "__main__":
    main()
