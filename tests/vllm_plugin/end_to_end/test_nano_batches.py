"""Steps whose token-wise ops are cut into nano-batches answer as steps that are not, on the real vLLM."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.support.vllm.engine import Answer, Engine, make_prompt
from tests.support.vllm.equivalence import MIXED, PROMPTS, assert_close, get_unsplit

NANO = {"DBO_MODE": "always", "DBO_SPLIT": "nano"}


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


@pytest.mark.parametrize("count", ["2", "3", "7"])
def test_a_prefill_is_close(one_rank: Engine, count: str) -> None:
    answers = run_in_nano_batches(one_rank, PROMPTS, DBO_MICRO_BATCHES=count)
    assert_close(get_unsplit(one_rank, PROMPTS), answers)


@pytest.mark.parametrize("policy", ["sequential", "alternate", "staggered:2"])
def test_two_ranks_prefill_is_close_in_every_order(two_ranks: Engine, policy: str) -> None:
    answers = run_in_nano_batches(two_ranks, PROMPTS, DBO_MICRO_BATCHES="3", DBO_POLICY=policy)
    assert_close(get_unsplit(two_ranks, PROMPTS), answers)


@pytest.mark.parametrize("count", ["2", "4"])
def test_decodes_and_steps_that_mix_them_with_prefills_are_close(two_ranks: Engine, count: str) -> None:
    answers = run_in_nano_batches(two_ranks, PROMPTS, 6, MIXED, least=5, DBO_MICRO_BATCHES=count)
    assert_close(get_unsplit(two_ranks, PROMPTS, 6, MIXED), answers)


def test_a_lone_prompt_of_few_tokens_is_close(two_ranks: Engine) -> None:
    prompt = [make_prompt(5, 3)]
    assert_close(get_unsplit(two_ranks, prompt), run_in_nano_batches(two_ranks, prompt, DBO_MICRO_BATCHES="5"))


def test_fewer_tokens_than_nano_batches_are_declined(two_ranks: Engine) -> None:
    before = two_ranks.statistics()[0]
    two_ranks.configure(**NANO, DBO_MICRO_BATCHES="5")
    try:
        two_ranks.generate([make_prompt(4, 3)])
    finally:
        two_ranks.configure(DBO_MODE="always")
    after = two_ranks.statistics()[0]
    reason = "fewer tokens than nano-batches"
    assert after["nano"] == before["nano"]
    assert after["declined"].get(reason, 0) == before["declined"].get(reason, 0) + 1


@pytest.mark.parametrize("check", ["1", "races"])
def test_checks_pass(two_ranks: Engine, check: str) -> None:
    answers = run_in_nano_batches(two_ranks, PROMPTS, 3, DBO_MICRO_BATCHES="3", DBO_CHECK=check)
    assert_close(get_unsplit(two_ranks, PROMPTS, 3), answers)
