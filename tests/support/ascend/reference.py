"""What transformers answers in float32, and how far answers of an engine are from it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.vllm.engine import Answer

LIKELY = -4.6  # words whose log-probabilities are compared: of 1 % and more


def tokenize(model: Path, prompts: Sequence[str]) -> list[list[int]]:
    """Return prompts as tokens."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    return [tokenizer(prompt)["input_ids"] for prompt in prompts]


def answer_in_float(model: Path, prompts: Sequence[Sequence[int]], tokens: int) -> list[Answer]:
    """Generate greedily."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    answers = []
    for prompt in prompts:
        words, found = list(prompt), Answer([], [])
        for _ in range(tokens):
            with torch.inference_mode():
                scores = network(torch.tensor([words])).logits[0, -1].log_softmax(-1)
            found.tokens.append(int(scores.argmax()))
            found.log_probs.append(dict(enumerate(scores.tolist())))
            words.append(found.tokens[-1])
        answers.append(found)
    return answers


def measure_error(wanted: Sequence[Answer], found: Sequence[Answer]) -> float:
    """Return the largest difference between log-probabilities of likely words, while the same words are chosen."""
    worst = 0.0
    for right, answer in zip(wanted, found, strict=True):
        for position, (expected, given) in enumerate(zip(right.log_probs, answer.log_probs, strict=True)):
            likely = [word for word, value in expected.items() if value > LIKELY]
            worst = max(worst, *(abs(expected[word] - given[word]) for word in likely))
            if right.tokens[position] != answer.tokens[position]:
                break
    return worst


def count_equal(one: Sequence[Answer], other: Sequence[Answer]) -> int:
    """Return how many answers have the same words."""
    return sum(a.tokens == b.tokens for a, b in zip(one, other, strict=True))
