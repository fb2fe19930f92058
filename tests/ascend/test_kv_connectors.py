"""A KV connector inside vllm-ascend, whose attention calls hooks of its own, is told the same in split steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.support.ascend.engines import start
from tests.support.ascend.jobs import answer, make_prompts
from tests.support.ascend.options import RECORDER
from tests.support.vllm.engine import Answer, Engine, find_difference
from tests.support.vllm.layer_events import SAVE, WAIT, WRITTEN, Event
from tests.support.vllm.ranks import Ranks

PROMPTS = make_prompts(40, 130, 64)
LAYERS = 3


@pytest.fixture(scope="module")
def recording_npu() -> Iterator[Ranks]:
    """Return an engine on one device, with a recorder."""
    yield from start(1, environment={"DBO_KV_CONNECTORS": "HookRecorder"}, **RECORDER)


def record(
    engine: Engine, rank: int, tokens: int, cuts: Sequence[int] | None, arrive: Sequence[int]
) -> tuple[list[Answer], int, list[list[Event]]]:
    """Answer, and return what was told meanwhile; see `answer`."""
    answers, (counts,) = answer(engine, rank, [PROMPTS], tokens, cuts, arrive)
    (steps,) = engine.llm.collective_rpc("take_steps")
    return answers, counts["split"], steps


@pytest.mark.parametrize("cut", [40, 170])
def test_a_prefill_is_told_of_alike_to_the_bit(recording_npu: Ranks, cut: int) -> None:
    ((unsplit, _, told),) = recording_npu.run(record, 1, None, ())
    ((split, count, steps),) = recording_npu.run(record, 1, [cut], ())
    assert count == 1
    assert find_difference(unsplit, split) == 0.0
    assert [event.what for event in told[0]] == [WAIT, WRITTEN, SAVE] * LAYERS
    assert all(event.is_whole for event in steps[0])
    assert steps == told


def test_steps_of_decodes_alone_call_no_wait_and_mixed_ones_call_it_once(recording_npu: Ranks) -> None:
    """vllm-ascend waits in prefills only: a micro-batch of decodes does not, the next one does."""
    arrive = (0, 0, 2)
    ((unsplit, _, told),) = recording_npu.run(record, 6, None, arrive)
    ((split, count, steps),) = recording_npu.run(record, 6, [2], arrive)
    assert count >= 1
    assert [answer.tokens for answer in split] == [answer.tokens for answer in unsplit]
    assert [describe(step) for step in steps] == [describe(step) for step in told]
    assert {len(step) for step in steps} == {3 * LAYERS, 2 * LAYERS}
    assert all(event.is_whole for step in steps for event in step)


def describe(step: Sequence[Event]) -> list[tuple[Any, ...]]:
    return [(event.what, event.layer, event.tokens, len(event.saved)) for event in step]
