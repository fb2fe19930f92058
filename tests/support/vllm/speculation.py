"""What tests ask of an engine with speculative decoding: the same answers split and unsplit, and as many drafts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from examples.tiny_tasks import Task, held_out
from tests.support.vllm.engine import Answer, Engine, make_prompt
from tests.support.vllm.equivalence import assert_close

LENGTHS = (96, 64, 160, 128, 80)
PROMPTS = [make_prompt(length, seed) for seed, length in enumerate(LENGTHS)]
TASKS = [{"prompt": task.prompt} for task in held_out(1)]  # drafts are right more often here
MIXED = (0, 0, 2, 2, 3, 0, 1, 2, 3)  # the later prompts and tasks arrive while the first are decoding
TOKENS = 8  # of an answer


@contextmanager
def count_drafts(engine: Engine) -> Iterator[Counter[str]]:
    """Count drafts, those accepted, and steps in which a request had some, while the context is open."""
    counts: Counter[str] = Counter()

    def count(_: Any, num_draft_tokens: int, num_accepted_tokens: int, **__: Any) -> None:
        counts.update(drafted=num_draft_tokens, accepted=num_accepted_tokens, verified=num_draft_tokens > 0)

    scheduler = engine.llm.llm_engine.engine_core.engine_core.scheduler
    with patch.object(scheduler, "make_spec_decoding_stats", count):
        yield counts


def generate(
    engine: Engine, mode: str, cuts: Sequence[int] | None = None, tokens: int = TOKENS, arrive: Sequence[int] = MIXED
) -> tuple[list[Answer], Counter[str], int]:
    """Return the answers to `PROMPTS` and `TASKS`, the counts of drafts, and how many steps were split."""
    engine.configure(DBO_MODE=mode)
    if cuts is not None:
        engine.cut_at(*cuts)
    before = engine.count_split()
    try:
        with count_drafts(engine) as counts:
            answers = engine.generate([*PROMPTS, *TASKS], tokens, arrive)
    finally:
        engine.cut_by_settings()
        engine.configure(DBO_MODE="always")
    return answers, counts, engine.count_split() - before


def assert_split_drafts_alike(engine: Engine, cuts: Sequence[int] | None = None, **how: Any) -> None:
    """Compare answers and acceptance, split and unsplit; nothing is compared if nothing is split or drafted."""
    asked = repr(how)
    if asked not in engine.known:
        engine.known[asked] = generate(engine, "off", **how)
    unsplit, drafts, none = engine.known[asked]
    split, split_drafts, steps = generate(engine, "always", cuts, **how)
    assert (none, steps > 0, drafts["drafted"] > 0) == (0, True, True)
    assert_close(unsplit, split)
    assert split_drafts == drafts


def assert_steps_check(engine: Engine) -> None:
    """Compare each split step with the unsplit one as it runs; data that a drafter reads as well."""
    engine.configure(DBO_CHECK="1")
    before = engine.count_split()
    try:
        with count_drafts(engine) as counts:
            engine.generate([*PROMPTS, *TASKS], TOKENS, MIXED)
    finally:
        engine.configure()
    assert counts["drafted"] > 0
    assert engine.count_split() > before


def answer_tasks(engine: Engine, tasks: Sequence[Task], mode: str) -> tuple[list[str], Counter[str]]:
    """Return the answers to tasks, and the counts of drafts."""
    engine.configure(DBO_MODE=mode)
    before = engine.count_split()
    try:
        with count_drafts(engine) as counts:
            answers = engine.answer([task.prompt for task in tasks])
    finally:
        engine.configure(DBO_MODE="always")
    assert (engine.count_split() > before) == (mode == "always")
    return answers, counts
