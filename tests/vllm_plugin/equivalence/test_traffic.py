"""What is drawn: the same for the same seed, what the model can be asked, and all kinds of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from dbo_runtime.vllm_plugin.equivalence.request import Abilities, Request
from dbo_runtime.vllm_plugin.equivalence.traffic import ALLOWED_EVERY, draw_round

FULL = Abilities(320, frozenset({0, 1, 7}), 256, tuple("abcdef"), "an <image>", loras=2)
BARE = Abilities(320, frozenset(), 64)
ROUNDS, SIZE = 2 * ALLOWED_EVERY, 48


def draw_all(abilities: Abilities) -> list[Request]:
    return [request for number in range(ROUNDS) for request in draw_round(abilities, number, SIZE, 0).requests.values()]


def test_a_round_is_the_same_whatever_else_is_drawn() -> None:
    first = draw_round(FULL, 3, SIZE, 1)
    draw_round(FULL, 2, SIZE, 1)
    assert draw_round(FULL, 3, SIZE, 1) == first
    assert first.requests == draw_round(FULL, 3, SIZE, 1).requests
    assert first.requests != draw_round(FULL, 4, SIZE, 1).requests
    assert first.requests != draw_round(FULL, 3, SIZE, 2).requests
    assert len(first.requests) == SIZE


def test_all_kinds_of_requests_are_drawn() -> None:
    requests = draw_all(FULL)
    counts = Counter(feature for request in requests for feature in request.features)
    asked = {"n", "seed", "stop", "stop_token_ids", "ignore_eos", "min_tokens", "presence_penalty", "logit_bias"}
    asked |= {"bad_words", "prompt_logprobs", "allowed_token_ids", "structured_outputs", "image", "lora"}
    assert {name for name in asked if counts[name] < 5} == set()
    assert sum(request.leaves is not None for request in requests) > 20
    assert counts["shared prefix"] > 100
    assert {kind for request in requests if request.structure for kind in request.structure} == {
        "json",
        "regex",
        "choice",
    }


def test_only_some_rounds_have_what_vllm_itself_is_wrong_with() -> None:
    with_allowed = {
        number
        for number in range(ROUNDS)
        for request in draw_round(FULL, number, SIZE, 0).requests.values()
        if "allowed_token_ids" in request.sampling
    }
    assert with_allowed == {ALLOWED_EVERY - 1, 2 * ALLOWED_EVERY - 1}


def test_requests_fit_and_ask_only_for_what_there_is() -> None:
    for abilities in (FULL, BARE, replace(FULL, lacking=frozenset({"seed", "prompt_logprobs"}))):
        requests = draw_all(abilities)
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
