"""Comparisons in engines of vLLM: steps that are cut answer as steps that are not."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from tests.support.vllm.engine import Answer, Engine, find_difference, make_prompt

NANO = {"DBO_MODE": "always", "DBO_SPLIT": "nano"}
ROUNDING = 0.25  # of log-probabilities, from bfloat16
TIE = 0.3  # less between the two likeliest tokens, and rounding may decide
CLOSE = 1e-4  # of log-probabilities in fp32, where the shapes of matrix products differ
LENGTHS = (96, 64, 160, 128, 80)
BOUNDARIES = list(accumulate(LENGTHS))[:-1]
PROMPTS = [make_prompt(length, seed) for seed, length in enumerate(LENGTHS)]


def run_unsplit(
    engine: Engine, prompts: Sequence[Sequence[int]], tokens: int = 1, arrive: Sequence[int] = ()
) -> list[Answer]:
    engine.configure(DBO_MODE="off")
    try:
        return engine.generate(prompts, tokens, arrive)
    finally:
        engine.configure(DBO_MODE="always")


def get_unsplit(
    engine: Engine, prompts: Sequence[Sequence[int]], tokens: int = 1, arrive: Sequence[int] = ()
) -> list[Answer]:
    """Return what `run_unsplit` returns, of an earlier test if there was one: many cuts are compared with the same."""
    asked = repr((prompts, tokens, arrive))
    if asked not in engine.known:
        engine.known[asked] = run_unsplit(engine, prompts, tokens, arrive)
    engine.configure(DBO_MODE="always")
    return engine.known[asked]


def run_cut(
    engine: Engine,
    cuts: Sequence[int],
    prompts: Sequence[Sequence[int]],
    tokens: int = 1,
    arrive: Sequence[int] = (),
) -> list[Answer]:
    before = engine.count_split()
    engine.cut_at(*cuts)
    try:
        answers = engine.generate(prompts, tokens, arrive)
    finally:
        engine.cut_by_settings()
    assert engine.count_split() > before, "nothing was split, so nothing was compared"
    return answers


def run_in_nano_batches(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    tokens: int = 1,
    arrive: Sequence[int] = (),
    least: int = 1,
    **settings: str,
) -> list[Answer]:
    """Return the answers of steps in nano-batches; at least *least* steps must have run so."""
    before = [rank["nano"] for rank in engine.statistics()]
    engine.configure(**NANO, **settings)
    try:
        answers = engine.generate(prompts, tokens, arrive)
    finally:
        engine.configure(DBO_MODE="always")
    ran = [rank["nano"] - earlier for rank, earlier in zip(engine.statistics(), before, strict=True)]
    assert min(ran) >= least, f"steps in nano-batches by rank: {ran}; nothing was compared"
    return answers


def assert_close(unsplit: list[Answer], split: list[Answer]) -> None:
    assert [answer.tokens for answer in split] == [answer.tokens for answer in unsplit]
    assert find_difference(unsplit, split) <= CLOSE


def assert_close_up_to_ties(unsplit: Sequence[Answer], split: Sequence[Answer]) -> None:
    """Compare log-probabilities of bfloat16 token by token, until rounding decides between two tokens."""
    for expected, answer in zip(unsplit, split, strict=True):
        for index, token in enumerate(expected.tokens):
            ours, theirs = answer.log_probs[index], expected.log_probs[index]
            assert max(abs(ours[word] - theirs[word]) for word in theirs) <= ROUNDING
            if answer.tokens[index] != token:
                assert theirs[token] - theirs[answer.tokens[index]] <= TIE
                break


MIXED = (0, 0, 2, 2, 3)  # the later prompts arrive while the first are decoding
