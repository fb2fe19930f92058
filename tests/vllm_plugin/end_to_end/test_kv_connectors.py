"""KV connectors under split steps, on the real vLLM: what they are told, what they save, and what is loaded from it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import pytest

from tests.vllm_plugin.end_to_end.test_equivalence import CLOSE, MIXED, PROMPTS
from tests.vllm_plugin.engine import Answer, Engine, find_difference, make_prompt
from tests.vllm_plugin.engines import TINY, Engines, share_cores
from tests.vllm_plugin.layer_recorder import ATTEND, SAVE, WAIT, Event

SETTINGS = {"DBO_KV_CONNECTORS": "LayerRecorder"}
RECORDER = {
    "kv_transfer_config": {
        "kv_connector": "LayerRecorder",
        "kv_connector_module_path": "tests.vllm_plugin.layer_recorder",
        "kv_role": "kv_both",
    },
    "worker_extension_cls": "tests.vllm_plugin.layer_recorder.Extension",
    "enable_prefix_caching": False,  # what is asked again is computed again
    "max_num_batched_tokens": 512,  # the prompts of test_equivalence are in two steps
}
CUTS = [((2, 162), "0"), ((17,), "0"), ((100, 300), "1"), ((1,), "0")]  # and DBO_CHECK, which runs each step twice

Steps = list[list[Event]]


@pytest.fixture(scope="module")
def recorded(engines: Engines) -> Engine:
    """Return an engine of two ranks, each with a recorder."""
    return engines.get(2, share_cores(), settings=SETTINGS, **RECORDER)


def examine_one_rank(rank: int) -> None:
    """Examine an engine in this process, which has no other: a connector belongs to a process."""
    with pytest.MonkeyPatch.context() as patch:
        for variable, value in {**SETTINGS, "VLLM_CPU_OMP_THREADS_BIND": "nobind"}.items():
            patch.setenv(variable, value)
        engine = Engine(TINY, 1, **RECORDER)
        try:
            examine_calls(engine)
            examine_order(engine)
            examine_failure(engine)
        finally:
            engine.close()


def take_steps(engine: Engine) -> list[Steps]:
    """Return the steps of each rank since the last call."""
    found: list[Steps] = engine.llm.collective_rpc("take_steps")
    return found


def run(engine: Engine, cuts: Sequence[int], prompts: Any, tokens: int, arrive: Any, **settings: str) -> tuple:
    """Generate with some settings; return answers, the steps of each rank, and how many were split."""
    engine.configure(**settings)
    engine.cut_at(*cuts)
    before = engine.count_split()
    try:
        answers = engine.generate(prompts, tokens, arrive)
    finally:
        engine.cut_by_settings()
        engine.configure()
    return answers, take_steps(engine), engine.count_split() - before


def examine_calls(engine: Engine) -> None:
    """Compare what a connector is told in split steps with what vLLM tells it in unsplit ones."""
    engine.llm.collective_rpc("watch_attention")
    long = [make_prompt(701, 3), *PROMPTS]  # which is prefilled in chunks
    unsplit, told, split = run(engine, (), long, 6, (0, *MIXED), DBO_MODE="off")
    assert split == 0
    for cuts, check in CUTS:
        answers, steps, split = run(engine, cuts, long, 6, (0, *MIXED), DBO_CHECK=check)
        assert split >= 2
        assert_close(unsplit, answers)
        for rank, expected in zip(steps, told, strict=True):
            assert_told_alike(rank, expected)
        assert any(len(group) > 1 for group in list_attending(steps[0])), "each layer attended at once"


def assert_close(unsplit: list[Answer], split: list[Answer]) -> None:
    assert [answer.tokens for answer in split] == [answer.tokens for answer in unsplit]
    assert find_difference(unsplit, split) <= CLOSE


def list_attending(steps: Steps) -> list[list[int]]:
    """Return the tokens of the attention calls of each layer of each step."""
    groups = (groupby(step, key=lambda event: event.what) for step in steps)
    return [[event.tokens for event in group] for each in groups for what, group in each if what == ATTEND]


def assert_told_alike(split: Steps, unsplit: Steps) -> None:
    """Check that each step has the calls of an unsplit one, around the attention of all micro-batches."""
    assert len(split) == len(unsplit)
    for own, expected in zip(split, unsplit, strict=True):
        attended = [(what, [*group]) for what, group in groupby(own, key=lambda event: event.what)]
        assert [what for what, _ in attended] == [WAIT, ATTEND, SAVE] * (len(expected) // 3)
        assert [event.what for event in expected] == [WAIT, ATTEND, SAVE] * (len(expected) // 3)
        for (what, group), reference in zip(attended, expected, strict=True):
            assert {event.layer for event in group} == {reference.layer}
            assert sum(event.tokens for event in group) == reference.tokens
            if what != ATTEND:
                (event,) = group
                assert event.is_whole
                assert event.saved == pytest.approx(reference.saved, abs=1e-3)


def examine_order(engine: Engine) -> None:
    """Ask for an issue order in which a micro-batch is layers ahead."""
    run(engine, (), PROMPTS, 1, (), DBO_MODE="off")
    _, _, split = run(engine, (17,), PROMPTS, 1, (), DBO_POLICY="sequential")
    assert split == 0
    for rank in engine.statistics():
        assert rank["declined"]["the KV connector takes one layer after the other"] == 1  # the other step is too short


def examine_failure(engine: Engine) -> None:
    """Let the second micro-batch fail in the second layer, and serve on."""
    expected, told, _ = run(engine, (17,), PROMPTS[:2], 1, ())
    second = [*dict.fromkeys(event.layer for event in told[0][0])][1]
    engine.llm.collective_rpc("fail_in", args=(second, 2))
    with pytest.raises(RuntimeError, match="no such kernel"):
        run(engine, (17,), PROMPTS[:2], 1, ())
    engine.abort_all()
    ((failed, *_),) = take_steps(engine)  # and the recorder is in its place again
    calls = [(event.what, event.layer == second) for event in failed if event.what != ATTEND]
    assert calls == [(WAIT, False), (SAVE, False), (WAIT, True)]
    answers, steps, split = run(engine, (17,), PROMPTS[:2], 1, ())
    assert split == 1
    assert answers == expected
    assert steps == told


def test_one_rank_tells_a_connector_the_same_as_in_unsplit_steps_and_after_one_that_fails(engines: Engines) -> None:
    engines.run(1, examine_one_rank)


def test_two_ranks_tell_a_connector_the_same_as_in_unsplit_steps(recorded: Engine) -> None:
    examine_calls(recorded)


def test_an_issue_order_with_a_micro_batch_layers_ahead_is_declined(recorded: Engine) -> None:
    examine_order(recorded)
