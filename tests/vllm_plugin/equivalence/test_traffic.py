"""What is drawn: the same for the same seed, what the model can be asked, and all kinds of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from dbo_runtime.vllm_plugin.equivalence.request import Abilities, Request, Round
from dbo_runtime.vllm_plugin.equivalence.traffic import ALLOWED_EVERY, draw_round

FULL = Abilities(320, frozenset({0, 1, 7}), 256, tuple("abcdef"), "an <image>", loras=2)
BARE = Abilities(320, frozenset(), 64)
ROUNDS, SIZE = ALLOWED_EVERY, 48


@pytest.fixture(scope="module")
def drawn() -> list[Round]:
    """All rounds of one seed."""
    return [draw_round(FULL, number, SIZE, 0) for number in range(ROUNDS)]


def list_requests(rounds: list[Round]) -> list[Request]:
    return [request for each in rounds for request in each.requests.values()]


def test_a_round_is_the_same_whatever_else_is_drawn() -> None:
    first = draw_round(FULL, 3, SIZE, 1)
    draw_round(FULL, 2, SIZE, 1)
    assert draw_round(FULL, 3, SIZE, 1) == first
    assert first.requests == draw_round(FULL, 3, SIZE, 1).requests
    assert first.requests != draw_round(FULL, 4, SIZE, 1).requests
    assert first.requests != draw_round(FULL, 3, SIZE, 2).requests
    assert len(first.requests) == SIZE


def test_all_kinds_of_requests_are_drawn(drawn: list[Round]) -> None:
    requests = list_requests(drawn)
    counts = Counter(feature for request in requests for feature in request.features)
    asked = {"n", "seed", "stop", "stop_token_ids", "ignore_eos", "min_tokens", "presence_penalty", "logit_bias"}
    asked |= {"bad_words", "prompt_logprobs", "allowed_token_ids", "structured_outputs", "image", "lora"}
    assert {name for name in asked if counts[name] < 3} == set()
    assert sum(request.leaves is not None for request in requests) > 10
    assert counts["shared prefix"] > 50
    assert {kind for request in requests if request.structure for kind in request.structure} == {
        "json",
        "regex",
        "choice",
    }


def test_only_some_rounds_have_what_vllm_itself_is_wrong_with(drawn: list[Round]) -> None:
    having = {
        each.number for each in drawn for request in list_requests([each]) if "allowed_token_ids" in request.sampling
    }
    assert having == {ALLOWED_EVERY - 1}


def test_requests_fit_and_ask_only_for_what_there_is(drawn: list[Round]) -> None:
    lacking = replace(FULL, lacking=frozenset({"seed", "prompt_logprobs"}))
    less = [(abilities, [draw_round(abilities, 0, SIZE, 0)]) for abilities in (BARE, lacking)]
    for abilities, rounds in [(FULL, drawn), *less]:
        requests = list_requests(rounds)
        for request in requests:
            tokens = request.prompt.draw_tokens(abilities, "a")
            assert len(tokens) == request.prompt.tokens + request.prompt.prefix_tokens
            assert len(tokens) + request.sampling["max_tokens"] <= abilities.longest
            assert not abilities.special & set(tokens)
            assert max(tokens, default=0) < abilities.vocabulary
            assert request.sampling.get("n", 1) == 1 or request.sampling["temperature"] > 0
        found = {feature for request in requests for feature in request.features}
        assert not abilities.lacking & found
        if abilities is BARE:
            assert not {"stop", "bad_words", "structured_outputs", "image", "lora"} & found


def test_prompts_share_prefixes() -> None:
    requests = draw_round(FULL, 0, SIZE, 0).requests.values()
    sharing = [request.prompt for request in requests if request.prompt.prefix == 0]
    one, other, *_ = (prompt.draw_tokens(FULL, "a") for prompt in sharing)
    shared = min(prompt.prefix_tokens for prompt in sharing[:2])
    assert shared > 0
    assert one[:shared] == other[:shared]
    assert one != other
