"""What requests may ask for besides tokens: the same from split steps as from unsplit ones."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.vllm.engine import Engine, make_prompt
from tests.support.vllm.engines import Engines, share_cores
from tests.support.vllm.equivalence import CLOSE, PROMPTS
from tests.support.vllm.families import make_family

SCHEMA = {"enum": ["even", "odd", {"sure": True}, {"sure": False}]}
CUTS = [(96,), (17, 263)]  # at a boundary of requests; inside two of them


@pytest.fixture(params=["one_rank", "two_ranks"])
def engine(request: pytest.FixtureRequest, engines: Engines) -> Iterator[Engine]:
    engine: Engine = request.getfixturevalue(request.param)
    yield engine
    engine.cut_by_settings()


def generate(engine: Engine, prompts: Sequence[Any], **sampling: Any) -> list[Any]:
    """Return what vLLM answers, with nothing in its prefix cache before."""
    assert engine.llm.reset_prefix_cache()
    return continue_with(engine, prompts, **sampling)


def continue_with(engine: Engine, prompts: Sequence[Any], **sampling: Any) -> list[Any]:
    """Return what vLLM answers, with what earlier requests left in its prefix cache."""
    from vllm import SamplingParams

    return list(engine.llm.generate(prompts, SamplingParams(temperature=0, **sampling), use_tqdm=False))


def generate_both(
    engine: Engine, cuts: Sequence[int], prompts: Sequence[Any], **sampling: Any
) -> tuple[list[Any], list[Any]]:
    """Return the answers from unsplit and from split steps."""
    engine.configure(DBO_MODE="off")
    unsplit = generate(engine, prompts, **sampling)
    engine.configure(DBO_MODE="always")
    engine.cut_at(*cuts)
    before = engine.count_split()
    split = generate(engine, prompts, **sampling)
    assert engine.count_split() > before, "nothing was split, so nothing was compared"
    return unsplit, split


@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_log_probabilities_of_prompts_are_close(engine: Engine, cuts: tuple[int, ...]) -> None:
    prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
    unsplit, split = generate_both(engine, cuts, prompts, max_tokens=2, prompt_logprobs=4)
    for one, other, prompt in zip(unsplit, split, PROMPTS, strict=True):
        assert one.prompt_logprobs[0] is None
        assert len(one.prompt_logprobs) == len(other.prompt_logprobs) == len(prompt)
        for token, expected, actual in zip(prompt[1:], one.prompt_logprobs[1:], other.prompt_logprobs[1:], strict=True):
            assert abs(expected[token].logprob - actual[token].logprob) <= CLOSE


def test_structured_answers_are_the_same(engine: Engine) -> None:
    from vllm.sampling_params import StructuredOutputsParams

    prompts = [f"{number}+{number * 3}=" for number in range(2, 8)]
    unsplit, split = generate_both(
        engine, (3,), prompts, max_tokens=48, structured_outputs=StructuredOutputsParams(json=SCHEMA)
    )
    texts = [output.outputs[0].text for output in split]
    assert texts == [output.outputs[0].text for output in unsplit]
    assert all(json.loads(text) in SCHEMA["enum"] for text in texts)


@pytest.mark.slow
def test_a_prefix_that_a_split_step_computed_is_reused_while_steps_are_scheduled_ahead(
    tmp_path: Path, engines: Engines
) -> None:
    """vLLM's CPU build reuses no prefix of latent attention, so the model is another."""
    prefix = make_prompt(256, 3)
    prompts = [{"prompt_token_ids": [*prefix, *make_prompt(24 + number, number)]} for number in range(4)]
    options = {"attention_backend": "CPU_ATTN", "enable_prefix_caching": True, "async_scheduling": True}
    with engines.start(2, share_cores(), make_family("LlamaForCausalLM", tmp_path), **options) as engine:

        def answer_twice() -> list[Any]:
            return [*generate(engine, prompts[:2], max_tokens=6), *continue_with(engine, prompts[2:], max_tokens=6)]

        engine.configure(DBO_MODE="off")
        unsplit = answer_twice()
        engine.configure(DBO_MODE="always")
        for cuts in ((100,), (3,)):
            engine.cut_at(*cuts)
            before = engine.count_split()
            split = answer_twice()
            assert engine.count_split() > before
            cached = [output.num_cached_tokens for output in split]
            assert cached == [output.num_cached_tokens for output in unsplit]
            assert min(cached[2:]) >= len(prefix) // 2
            assert [one.outputs[0].token_ids for one in split] == [one.outputs[0].token_ids for one in unsplit]
