"""What is drawn: the same for the same seed, what the model can be asked, and all kinds of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from dbo_runtime.lab.soak.request import Abilities, Request, Round
from dbo_runtime.lab.soak.traffic import ALLOWED_EVERY, PAUSES, TINY, TURNS, draw_round

FULL = Abilities(320, frozenset({0, 1, 7}), 256, tuple("abcdef"), "an <image>", loras=2)
BARE = Abilities(320, frozenset(), 64)
POOLING = replace(FULL, tasks=("embed", "token_embed"))
ROUNDS, SIZE = ALLOWED_EVERY, 48


@pytest.fixture(scope="module")
def drawn() -> list[Round]:
    """All rounds of one seed."""
    return [draw_round(FULL, number, SIZE, 0) for number in range(ROUNDS)]


def list_requests(rounds: list[Round]) -> list[Request]:
    return [request for each in rounds for request in each.requests.values()]


@pytest.mark.slow
def test_a_round_is_the_same_whatever_else_is_drawn() -> None:
    first = draw_round(FULL, 3, SIZE, 1)
    draw_round(FULL, 2, SIZE, 1)
    assert draw_round(FULL, 3, SIZE, 1) == first
    assert first.requests == draw_round(FULL, 3, SIZE, 1).requests
    assert first.requests != draw_round(FULL, 4, SIZE, 1).requests
    assert first.requests != draw_round(FULL, 3, SIZE, 2).requests
    assert len(first.requests) == SIZE


@pytest.mark.slow
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


@pytest.mark.slow
def test_only_some_rounds_have_what_vllm_itself_is_wrong_with(drawn: list[Round]) -> None:
    having = {
        each.number for each in drawn for request in list_requests([each]) if "allowed_token_ids" in request.sampling
    }
    assert having == {ALLOWED_EVERY - 1}


@pytest.mark.slow
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


@pytest.mark.slow
def test_most_prompts_are_their_own(drawn: list[Round]) -> None:
    """Hypothesis repeats more than half of them, left to itself."""
    for each in drawn:
        seeds = Counter(request.prompt.seed for request in list_requests([each]))
        assert 0.8 * SIZE <= len(seeds) < SIZE


@pytest.mark.slow
def test_prompts_share_prefixes() -> None:
    requests = draw_round(FULL, 0, SIZE, 0).requests.values()
    sharing = [request.prompt for request in requests if request.prompt.prefix == 0]
    one, other, *_ = {prompt.seed: prompt for prompt in sharing}.values()  # a few prompts are drawn twice
    shared = min(one.prefix_tokens, other.prefix_tokens)
    one, other = (prompt.draw_tokens(FULL, "a") for prompt in (one, other))
    assert shared > 0
    assert one[:shared] == other[:shared]
    assert one != other


@pytest.mark.slow
def test_prompts_of_a_few_tokens_come_beside_decodes(drawn: list[Round]) -> None:
    for each in drawn:
        requests = list_requests([each])
        tiny = [request for request in requests if 0 < len(request.prompt.draw_tokens(FULL, "a")) <= TINY]
        arrivals = [request.arrives for request in requests if request.sampling["max_tokens"] > TINY]
        assert sum(any(when < request.arrives for when in arrivals) for request in tiny) >= 3


def test_a_model_that_pools_is_asked_for_all_that_its_pooler_does() -> None:
    requests = list_requests([draw_round(POOLING, number, SIZE, 0) for number in range(2)])
    tasks = Counter(request.pooling["task"] for request in requests if request.pooling is not None)
    assert tasks.total() == len(requests) == 2 * SIZE
    assert {*tasks} == {*POOLING.tasks}
    assert min(tasks.values()) > 10
    activations = Counter((request.pooling or {}).get("use_activation") for request in requests)
    assert min(activations[kind] for kind in (None, True, False)) > 3
    lengths = [len(request.prompt.draw_tokens(POOLING, "a")) for request in requests]
    assert min(lengths) >= 1
    assert min(lengths) <= TINY
    assert POOLING.longest / 2 < max(lengths) < POOLING.longest
    assert sum(request.leaves is not None for request in requests) > 5
    assert {request.lora for request in requests} == {None, 0, 1}
    assert not any(request.sampling or request.structure for request in requests)


@pytest.mark.slow
def test_rounds_pause_while_requests_are_to_come_if_that_is_asked_for() -> None:
    plain = draw_round(FULL, 0, SIZE, 0)
    paused = [draw_round(FULL, number, SIZE, 0, pauses=True) for number in range(ROUNDS)]
    assert plain.pause is None
    assert paused[0].requests == plain.requests
    assert {each.pause for each in paused} <= {*PAUSES}
    assert len({each.pause for each in paused}) > 2
    asked_again = 0
    for each in paused:
        prefixes: dict[bool, set[int | None]] = {True: set(), False: set()}
        for request in list_requests([each]):
            prefixes[request.arrives < (each.pause or 0)].add(request.prompt.prefix)
        assert all(prefixes.values())
        asked_again += bool(prefixes[True] & prefixes[False] - {None})
    assert asked_again >= ROUNDS / 2, "what is cached before a pause must be asked for after it"
    few = Round(0, "0/0", {0: replace(list_requests([plain])[0], arrives=0)}, pause=TURNS)
    assert few.turns == TURNS + 1, "a round is not over before its pause"
