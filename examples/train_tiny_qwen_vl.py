"""Train a tiny Qwen2.5-VL from scratch, on one or two CPU cores, in some minutes.

The model has every part of Qwen2.5-VL that serving must get right (layers that attend within windows and within whole
pictures, merged patches, rotary embedding over three axes) in 1.7 million parameters, and it *sees* something: the
tasks of ``tiny_pictures``, whose answers are right or wrong.

The seed reproduces the accuracy, not the bits: matrix products are summed in another order on another machine.
"""

import argparse
import itertools
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tiny_pictures import Question, held_out, training_stream
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.optim.lr_scheduler import LambdaLR
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
)

OUT = Path(__file__).parent / "tiny-qwen-vl"
END, PAD = "<|im_end|>", "<|endoftext|>"
MARKS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
CHAT = (  # a conversation is what its messages say, and nothing between them
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% else %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% endif %}{% endfor %}{% endif %}{% endfor %}"
)
PATCHES = {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}
SMALLEST, LARGEST = 56 * 56, 448 * 448  # pixels of a picture that is not resized
LONGEST_ANSWER = 24  # tokens
BATCH = 48  # questions of one optimizer step
RATE = 1e-3
WARMUP_STEPS = 50
IGNORED = -100  # target of a position without loss


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer with one token per byte and one per mark of a picture."""
    special = [PAD, END, *MARKS]
    tokens = special + sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    tokenizer.add_special_tokens(special)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, model_max_length=2048)


def build_processor() -> Qwen2_5_VLProcessor:
    """Build what turns text and pictures into what the model takes."""
    sizes = {"size": {"shortest_edge": SMALLEST, "longest_edge": LARGEST}, **PATCHES}
    colours = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    pictures = Qwen2VLImageProcessor(**sizes, **colours)
    videos = Qwen2VLVideoProcessor(**sizes, **colours)
    return Qwen2_5_VLProcessor(pictures, build_tokenizer(), videos, chat_template=CHAT)


def build_config(tokenizer: PreTrainedTokenizerFast) -> Qwen2_5_VLConfig:
    """Describe the model: Qwen2.5-VL (arXiv:2502.13923) made small."""
    marks = dict(zip(MARKS, tokenizer.convert_tokens_to_ids(list(MARKS)), strict=True))
    text = {
        "vocab_size": 320,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "use_sliding_window": False,
    }
    vision = {
        "depth": 4,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_heads": 4,
        "patch_size": PATCHES["patch_size"],
        "temporal_patch_size": PATCHES["temporal_patch_size"],
        "spatial_merge_size": PATCHES["merge_size"],
        "out_hidden_size": 128,
        "window_size": 56,
        "fullatt_block_indexes": [1, 3],
        "hidden_act": "silu",
    }
    return Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=marks["<|image_pad|>"],
        video_token_id=marks["<|video_pad|>"],
        vision_start_token_id=marks["<|vision_start|>"],
        vision_end_token_id=marks["<|vision_end|>"],
        tie_word_embeddings=False,
    )


def encode(processor: Qwen2_5_VLProcessor, questions: Sequence[Question], with_answers: bool) -> dict[str, Any]:
    """Turn questions into a padded batch, with answers to be learned or without."""
    pictures = [picture for question in questions for picture in question.pictures]
    texts = [question.prompt + (question.answer + END if with_answers else "") for question in questions]
    side = "right" if with_answers else "left"
    batch = processor(text=texts, images=pictures or None, padding=True, padding_side=side, return_tensors="pt")
    if with_answers:
        labels = torch.full_like(batch["input_ids"], IGNORED)
        for row, (question, mask) in enumerate(zip(questions, batch["attention_mask"], strict=True)):
            end, length = int(mask.sum()), len(question.answer) + 1  # a token a letter
            labels[row, end - length : end] = batch["input_ids"][row, end - length : end]
        batch["labels"] = labels
    return dict(batch)


def train(steps: int, seed: int) -> tuple[Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLProcessor]:
    """Train a model, with a line of progress now and then."""
    torch.manual_seed(seed)
    processor = build_processor()
    model = Qwen2_5_VLForConditionalGeneration(build_config(processor.tokenizer))
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.05)
    schedule = LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / WARMUP_STEPS) * min(1.0, 2.5 * (1 - step / steps) + 0.02)
    )
    stream, start = training_stream(seed), time.monotonic()
    for step in range(steps):
        batch = encode(processor, list(itertools.islice(stream, BATCH)), with_answers=True)
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step:5d}  loss {loss.item():.4f}  {time.monotonic() - start:.0f} s", flush=True)
    return model, processor


@torch.no_grad()
def measure_accuracy(model: Any, processor: Qwen2_5_VLProcessor, questions: Sequence[Question]) -> float:
    """Return the share of questions that are answered right, greedily."""
    right = 0
    for first in range(0, len(questions), BATCH):
        group = questions[first : first + BATCH]
        batch = encode(processor, group, with_answers=False)
        tokens = model.generate(**batch, max_new_tokens=LONGEST_ANSWER, do_sample=False)
        answers = processor.batch_decode(tokens[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
        right += sum(answer == question.answer for answer, question in zip(answers, group, strict=True))
    return right / len(questions)


def save(model: Any, processor: Qwen2_5_VLProcessor, folder: Path) -> None:
    """Write the model in bfloat16, and what vLLM needs to serve it."""
    model.to(torch.bfloat16).save_pretrained(folder)
    processor.save_pretrained(folder)
    settings = json.loads((folder / "config.json").read_text())
    settings["architectures"] = ["Qwen2_5_VLForConditionalGeneration"]
    (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n")


def main() -> None:
    """Train, measure, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    model, processor = train(arguments.steps, arguments.seed)
    model.to(torch.bfloat16).to(torch.float32)  # as it will be loaded
    print(f"held-out questions answered right: {measure_accuracy(model, processor, held_out(400)):.1%}")
    save(model, processor, arguments.out)


if __name__ == "__main__":
    main()
