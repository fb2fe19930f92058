"""Answers of an engine to the same requests, compared: all log-probabilities that both have, token by token."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from .engine import Engine

LogProbs = list[dict[int, float]]
Answers = dict[str, LogProbs]
"""By request: for each of its tokens, the log-probabilities of the best words."""

# Requests as (after so many steps, tokens): prefills alone, decodes, and steps that mix them. Of long ones, both pieces
# of a cut are prefills for any backend; short ones some call decodes.
TRAFFIC = {
    "cuda": ((0, 300), (0, 17), (0, 1701), (1, 260), (3, 2030), (4, 64), (6, 5)),
    "cpu": ((0, 60), (0, 17), (0, 101), (1, 40), (3, 130), (4, 24), (6, 5)),
}
TOKENS = 6  # of an answer
WORDS = 20  # whose log-probabilities are compared
FLOORS = {"bfloat16": 0.05, "float16": 0.02, "float32": 1e-3}
"""A difference of log-probabilities that rounding explains at least, by type."""
MOST = 0.5  # that it explains at most
SPREAD = 2.0  # times what unsplit answers differ by among themselves, that split ones may


@dataclass(frozen=True)
class Difference:
    """How far two sets of answers are apart.

    Attributes:
        largest: difference of a log-probability that both have, up to the first other token of a request.
        others: requests of which a token differs although its log-probabilities tell it from the next best.
        ties: requests of which a token differs where they do not.
    """

    largest: float
    others: int
    ties: int

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self)


def answer(engine: Engine, device: str, is_alone: bool = False) -> Answers:
    """Answer all requests, each after its steps; with *is_alone* each after all others have ended."""
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True, logprobs=WORDS, detokenize=False)
    vllm, done, step = engine.llm.llm_engine, {}, 0
    words = vllm.vllm_config.model_config.get_vocab_size()
    waiting = dict(enumerate(TRAFFIC[device]))
    while waiting or vllm.has_unfinished_requests():
        due = [number for number, (arrives, _) in waiting.items() if arrives <= step and not is_alone]
        if is_alone and not vllm.has_unfinished_requests():
            due = list(waiting)[:1]
        for number in due:
            prompt = make_prompt(number, waiting.pop(number)[1], words)
            vllm.add_request(str(number), {"prompt_token_ids": prompt}, sampling)
        for output in vllm.step():
            if output.finished:
                found = output.outputs[0].logprobs
                done[output.request_id] = [{word: each.logprob for word, each in at.items()} for at in found]
        step += 1
    return done


def make_prompt(number: int, length: int, words: int) -> list[int]:
    """Return a prompt of some length that says nothing, another one for each number."""
    return [(number * 7 + j * (1 + number) + j * j) % (words - 8) + 4 for j in range(length)]


def compare(one: Answers, other: Answers, tolerance: float) -> Difference:
    """Return how far answers are apart.

    After another token contexts differ, so the rest of that request is left out.

    Raises:
        ValueError: if a log-probability is no finite number: no comparison with one says that answers differ.
    """
    check_finite(one)
    check_finite(other)
    largest, others, ties = 0.0, 0, 0
    for request in one:
        for a, b in zip(one[request], other[request], strict=True):
            largest = max([largest, *(abs(a[word] - b[word]) for word in a.keys() & b.keys())])
            best, second = (max(at, key=at.__getitem__) for at in (a, b))
            if best != second:
                gap = a[best] - a.get(second, float("-inf"))
                others, ties = (others, ties + 1) if gap <= tolerance else (others + 1, ties)
                break
    return Difference(largest, others, ties)


def check_finite(answers: Answers) -> None:
    """Check that all log-probabilities are finite numbers.

    Raises:
        ValueError: if one is not.
    """
    for request, tokens in answers.items():
        if not all(math.isfinite(value) for at in tokens for value in at.values()):
            raise ValueError(f"request {request} has log-probabilities that are no finite numbers")


def find_tolerance(noise: float, dtype: str) -> float:
    """Return what rounding explains, given how far answers are apart that vLLM computes in other ways."""
    return min(MOST, max(FLOORS[dtype], SPREAD * noise))
