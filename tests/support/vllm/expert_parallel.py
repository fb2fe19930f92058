"""The same comparisons on data parallel ranks, which take steps together."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from tests.support.vllm.engine import Answer, Engine, make_prompt
from tests.support.vllm.equivalence import assert_close
from tests.support.vllm.ranks import Ranks

LENGTHS = ((96, 64, 160, 128, 80), (32, 200, 48, 48, 120, 16))
BATCHES = [
    [make_prompt(length, 10 * rank + seed) for seed, length in enumerate(own)] for rank, own in enumerate(LENGTHS)
]
EDGES = [list(accumulate(own))[:-1] for own in LENGTHS]
LONG = [make_prompt(600, 4)]
FEW: dict[str, list[list[int]]] = {
    "an idle rank": [],
    "one token": [make_prompt(1, 3)],
    "two prompts of one token": [make_prompt(1, 3), make_prompt(1, 8)],
}
TURNS = 20
ARRIVALS = ((0, 0, 2, 2, 3), (0, 1, 1, 2, 4, 4))


def generate(
    engine: Engine, rank: int, mode: str, cuts: Any, tokens: int, arrive: Any, batches: Any = BATCHES
) -> tuple[list[Answer], int, list[str]]:
    """Run this rank's prompts; return answers, steps split, and reasons not to."""
    engine.configure(DBO_MODE=mode)
    engine.llm.collective_rpc("dbo_cut_at", args=(cuts,))
    before = engine.statistics()[0]
    answers = run_prompts(engine, batches[rank], tokens, arrive[rank] if arrive else ())
    engine.cut_by_settings()
    engine.configure(DBO_MODE="always")
    after = engine.statistics()[0]
    return answers, after["split"] - before["split"], list(count_since(before["declined"], after["declined"]))


def run_prompts(engine: Engine, prompts: Any, tokens: int, arrive: Any = ()) -> list[Answer]:
    """Run prompts in as many turns as any rank needs; return the answers in the prompts' order."""
    arrivals: dict[int, list[list[int]]] = {}
    names = []
    for prompt, turn in zip(prompts, arrive or [0] * len(prompts), strict=True):
        names.append(f"{turn}-{len(arrivals.setdefault(turn, []))}")
        arrivals[turn].append(prompt)
    answers = engine.serve(arrivals, TURNS, tokens)
    return [answers[name] for name in names]


def count_since(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    return {reason: more for reason, count in after.items() if (more := count - before.get(reason, 0))}


def assert_split_is_close(ranks: Ranks, cuts: Any, tokens: int = 1, arrive: Any = (), batches: Any = BATCHES) -> None:
    unsplit = ranks.run_once(generate, "off", None, tokens, arrive, batches)
    split = ranks.run(generate, "always", cuts, tokens, arrive, batches)
    for (expected, _, _), (answers, _, _) in zip(unsplit, split, strict=True):
        assert_answers_are_close(expected, answers)
    counts = {count for _, count, _ in split}
    assert len(counts) == 1
    assert counts.pop() > 0, "nothing was split, so nothing was compared"


def assert_answers_are_close(expected: list[Answer], answers: list[Answer]) -> None:
    """Compare the answers of a rank, which has none if it was idle."""
    assert len(answers) == len(expected)
    if expected:
        assert_close(expected, answers)


def assert_few_tokens_are_padded(ranks: Ranks) -> None:
    """Compare a long prefill next to an idle rank, and next to ranks of a token or two."""
    for few in FEW.values():
        assert_split_is_close(ranks, None, 2, (), [LONG, few])


def generate_in_nano_batches(
    engine: Engine, rank: int, tokens: int, arrive: Any, batches: Any, settings: dict[str, str]
) -> tuple[list[Answer], int, dict[str, int]]:
    """Run this rank's prompts; return answers, steps in nano-batches, and reasons against these."""
    engine.configure(**settings)
    before = engine.statistics()[0]
    answers = run_prompts(engine, batches[rank], tokens, arrive[rank] if arrive else ())
    engine.configure(DBO_MODE="always")
    after = engine.statistics()[0]
    return answers, after["nano"] - before["nano"], count_since(before["declined"], after["declined"])
