"""Tell bugs from what vLLM does by itself: a difference that unsplit runs show among themselves is vLLM's own.

vLLM's own faults depend on which requests meet in a step, and where in it they are. So the requests of a round are
answered again, unsplit: once more as they were, in other orders of arrival, and each suspect alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from dbo_runtime.vllm_plugin.equivalence.comparison import TOKEN, compare_answers
from dbo_runtime.vllm_plugin.equivalence.request import Request, Round

if TYPE_CHECKING:
    from dbo_runtime.vllm_plugin.equivalence.answer import Answer
    from dbo_runtime.vllm_plugin.equivalence.engine_process import EngineProcess

SPREAD = 4  # times as many turns between arrivals

Kinds = dict[int, set[str]]
"""What differs, by the number of the request."""


def find_own_differences(
    engine: EngineProcess, traffic: Round, expected: Mapping[int, Answer], suspects: Sequence[int], tolerance: float
) -> Kinds:
    """Return in what unsplit answers of a round differ from the *expected* ones, which are unsplit, too.

    Args:
        engine: that does not split.
        traffic: the round.
        expected: its answers.
        suspects: requests whose split answers differ.
        tolerance: of log-probabilities.
    """
    kinds: Kinds = {number: set() for number in traffic.requests}
    for again in _vary(traffic, suspects):
        answers, _ = engine.run(again)
        for number, answer in answers.items():
            found = compare_answers(traffic.requests[number], expected[number], answer, tolerance).difference
            if found is not None:
                kinds[number].add(found.kind)
    return kinds


def is_own(kind: str, number: int, kinds: Kinds) -> bool:
    """Return whether a request's difference is of a kind that unsplit answers show, too.

    It is to be the same request's, but for another token where log-probabilities are the same: there the model has done
    the same, so it is the sampler that differs. vLLM's keeps state by the place of a request in the batch, and whose
    place is the wrong one is another matter each time.
    """
    return kind in kinds[number] or (kind == TOKEN and any(TOKEN in found for found in kinds.values()))


def _vary(traffic: Round, suspects: Sequence[int]) -> Iterator[Round]:
    """Return the round as it was, with arrivals spread out and in reverse, and each suspect alone."""
    last = traffic.turns - 1
    requests = traffic.requests
    yield traffic
    yield _replace(traffic, {n: replace(each, arrives=SPREAD * each.arrives) for n, each in requests.items()})
    yield _replace(traffic, {n: replace(each, arrives=last - each.arrives) for n, each in requests.items()})
    for number in suspects:
        yield _replace(traffic, {number: replace(requests[number], arrives=0)})


def _replace(traffic: Round, requests: dict[int, Request]) -> Round:
    return Round(traffic.number, traffic.seed, requests)
