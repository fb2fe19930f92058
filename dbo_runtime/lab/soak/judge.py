"""Tell bugs from vLLM's own variation: a difference that unsplit runs also show among themselves is vLLM's own.

vLLM's own faults depend on which requests meet in a step, and on their places in it. So the requests of a round are
answered again, unsplit: in the same way, in other orders of arrival, and each suspect alone.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from dbo_runtime.lab.soak.comparison import TOKEN, compare_answers
from dbo_runtime.lab.soak.request import Abilities, Request, Round

if TYPE_CHECKING:
    from dbo_runtime.lab.soak.answer import Answer
    from dbo_runtime.lab.soak.engine_process import EngineProcess

SPREAD = 4  # factor for the turns between arrivals
ALONE = 8  # most suspects of a round to ask alone; with more, something is wrong with all
SHUFFLES = 12  # most orders of arrival
CONTRADICTION = "contradiction"
UNCERTAIN = ("bad_words", "min_tokens")  # features that forbid tokens that a request does not name

Kinds = dict[int, set[str]]
"""Kinds of difference by request number; `contradiction` for an answer with a token that was not the best."""


def find_own_differences(
    engine: EngineProcess,
    traffic: Round,
    expected: Mapping[int, Answer],
    suspects: Mapping[int, set[str]],
    tolerance: float,
) -> Kinds:
    """Return how unsplit answers of a round differ from the *expected* ones, which are also unsplit.

    Args:
        engine: an engine that does not split.
        traffic: the round.
        expected: answers of the round.
        suspects: kinds in which split answers differ, by request.
        tolerance: largest accepted difference of log-probabilities.
    """
    kinds: Kinds = {number: set() for number in traffic.requests}
    _note(kinds, traffic, expected, expected, tolerance)
    for again in _vary(traffic, suspects):
        _note(kinds, traffic, expected, engine.run(again)[0], tolerance)
    for again in _shuffle(traffic):
        if all(is_own(kind, number, kinds) for number, found in suspects.items() for kind in found if kind == TOKEN):
            break
        _note(kinds, traffic, expected, engine.run(again)[0], tolerance)
    return kinds


def is_own(kind: str, number: int, kinds: Kinds) -> bool:
    """Return whether a request's difference is of a kind that unsplit answers also show.

    It must be a difference of the same request. The exception is another token with equal log-probabilities: the model
    did the same, so the sampler differs. vLLM's sampler keeps state by a request's place in the batch, and it varies
    which place is wrong.
    """
    if kind in kinds[number]:
        return True
    return kind == TOKEN and any({TOKEN, CONTRADICTION} & found for found in kinds.values())


def starts_from_others(abilities: Abilities, request: Request) -> bool:
    """Return whether vLLM itself starts this request from the state that another request has left."""
    return abilities.has_states and request.prompt.is_one_token


def contradicts_itself(request: Request, answer: Answer, tolerance: float) -> bool:
    """Return whether a greedy answer has a token that is not allowed, or not the best by its own log-probabilities.

    Returns False if this cannot be decided.
    """
    if not request.is_greedy or request.structure is not None or any(name in request.sampling for name in UNCERTAIN):
        return False
    allowed = request.sampling.get("allowed_token_ids")
    for completion in answer.completions:
        for position, (token, log_probs) in enumerate(zip(completion.tokens, completion.log_probs, strict=False)):
            before = completion.tokens[:position]
            scores = {
                other: request.score(other, log_prob, before)
                for other, log_prob in log_probs.items()
                if allowed is None or other in allowed
            }
            if token not in scores or max(scores.values()) > scores[token] + tolerance:
                return True
    return False


def _note(
    kinds: Kinds, traffic: Round, expected: Mapping[int, Answer], answers: Mapping[int, Answer], tolerance: float
) -> None:
    """Add the differences, and the answers that contradict themselves."""
    for number, answer in answers.items():
        request = traffic.requests[number]
        found = compare_answers(request, expected[number], answer, tolerance).difference
        if found is not None:
            kinds[number].add(found.kind)
        if contradicts_itself(request, answer, tolerance):
            kinds[number].add(CONTRADICTION)


def _vary(traffic: Round, suspects: Mapping[int, set[str]]) -> Iterator[Round]:
    """Yield the round unchanged, with arrivals spread out, reversed, and each suspect alone."""
    last = traffic.turns - 1
    requests = traffic.requests
    yield traffic
    yield replace(traffic, requests={n: replace(each, arrives=SPREAD * each.arrives) for n, each in requests.items()})
    yield replace(traffic, requests={n: replace(each, arrives=last - each.arrives) for n, each in requests.items()})
    for number in sorted(suspects)[:ALONE]:
        yield replace(traffic, requests={number: replace(requests[number], arrives=0)})


def _shuffle(traffic: Round) -> Iterator[Round]:
    """Yield the round in other orders of arrival."""
    for number in range(SHUFFLES):
        arrivals = [request.arrives for request in traffic.requests.values()]
        random.Random(f"{traffic.seed}/shuffle/{number}").shuffle(arrivals)
        pairs = zip(traffic.requests.items(), arrivals, strict=True)
        yield replace(traffic, requests={n: replace(each, arrives=turn) for (n, each), turn in pairs})
