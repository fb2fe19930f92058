"""KV connectors under split steps, on the real vLLM: what they are told, what they save, and what is loaded from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.vllm.costs import calibrate_few
from tests.support.vllm.engine import Answer, Engine, find_difference, make_prompt
from tests.support.vllm.engines import TINY, Engines, share_cores
from tests.support.vllm.equivalence import MIXED, PROMPTS, assert_close
from tests.support.vllm.expert_parallel import ARRIVALS, generate
from tests.support.vllm.layer_events import ATTEND, SAVE, WAIT, Event
from tests.support.vllm.ranks import Ranks

RECORDER = {
    "kv_transfer_config": {
        "kv_connector": "LayerRecorder",
        "kv_connector_module_path": "tests.support.vllm.layer_recorder",
        "kv_role": "kv_both",
    },
    "worker_extension_cls": "tests.support.vllm.layer_recorder.Extension",
    "enable_prefix_caching": False,  # what is asked again is computed again
    "max_num_batched_tokens": 512,  # the prompts of test_equivalence are in two steps
}
DECLARED = {"DBO_KV_CONNECTORS": "LayerRecorder"}
CUTS = [((2, 162), "0"), ((17,), "0"), ((100, 300), "1"), ((1,), "0")]  # and DBO_CHECK, which runs each step twice
LAYERS = 3

Steps = list[list[Event]]
Examine = Callable[..., Any]


@pytest.fixture(scope="module")
def recorded(engines: Engines) -> Engine:
    """Return an engine of two ranks, each with a recorder."""
    return engines.get(2, share_cores(), settings=DECLARED, **RECORDER)


@pytest.mark.slow
def test_two_ranks_tell_a_connector_the_same_as_in_unsplit_steps(recorded: Engine) -> None:
    examine_calls(recorded)


def test_an_issue_order_with_a_micro_batch_layers_ahead_is_declined(recorded: Engine) -> None:
    examine_order(recorded)


def test_one_rank_tells_a_connector_the_same_as_in_unsplit_steps_and_after_one_that_fails(engines: Engines) -> None:
    engines.run(1, run_alone, RECORDER, examine_all)


@pytest.mark.slow
def test_data_parallel_ranks_with_a_dense_layer_tell_a_connector_the_same(engines: Engines) -> None:
    """A dense layer does not communicate there, so nothing but the connector makes micro-batches take turns in it."""
    with engines.start_ranks(2, settings=DECLARED, **RECORDER) as ranks:
        ranks.run(watch_attention)
        unsplit, expected = answer(ranks, "off", None, 1), answer(ranks, "off", None, 6, ARRIVALS)
        for cuts in ([[263], [232]], [[100, 300], [20, 40]]):
            assert_alike(answer(ranks, "always", cuts, 1), unsplit)
        assert_alike(answer(ranks, "always", [[2], [3]], 6, ARRIVALS), expected)
        assert_alike(answer(ranks, "always", None, 1), unsplit)
        digests = ranks.run(calibrate)  # dummy batches tell the connector nothing
        assert ranks.run(take_own_steps) == [[], []]
        assert len({*digests}) == 1
        assert_alike(answer(ranks, "always", None, 1), unsplit)
        assert all(ranks.run(is_planned_by_costs))


def answer(
    ranks: Ranks, mode: str, cuts: Any, tokens: int, arrive: Any = ()
) -> list[tuple[list[Answer], Steps, int, list[str]]]:
    """Return of each rank its answers, what its connector was told, how many steps were split, and reasons not to."""
    found = ranks.run(generate, mode, cuts, tokens, arrive)
    return [
        (answers, steps, split, declined)
        for (answers, split, declined), steps in zip(found, ranks.run(take_own_steps), strict=True)
    ]


def assert_alike(split: Any, unsplit: Any) -> None:
    for (answers, steps, count, declined), (expected, told, none, _) in zip(split, unsplit, strict=True):
        assert (none, count > 0) == (0, True), declined
        assert_close(expected, answers)
        assert_told_alike(steps, told)
        assert len(list_attending(steps)) > len(list_attending(told)), "no layer attended more than once"


def watch_attention(engine: Engine, _: int) -> None:
    engine.llm.collective_rpc("watch_attention")


def take_own_steps(engine: Engine, _: int) -> Steps:
    return take_steps(engine)[0]


def calibrate(engine: Engine, _: int) -> str:
    """Plan by costs from now on; return their digest."""
    digest: str = engine.llm.collective_rpc(calibrate_few)[0][1]
    return digest


def is_planned_by_costs(engine: Engine, _: int) -> bool:
    return engine.llm.collective_rpc("dbo_last_step")[0]["expected"] is not None


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_a_split_prefill_saves_another_engine_loads_and_answers_alike(
    ranks: int, engines: Engines, tmp_path: Path
) -> None:
    split, unsplit = tmp_path / "split", tmp_path / "unsplit"
    expected = with_engine(engines, ranks, store_in(unsplit), save, "off")
    assert_close(expected, with_engine(engines, ranks, store_in(split), save, "always"))
    own, reference = read_stored(split), read_stored(unsplit)
    assert len(own) == LAYERS * len(PROMPTS)
    torch.testing.assert_close(own, reference, atol=1e-4, rtol=1e-3)
    loaded, without = with_engine(engines, ranks, store_in(split), load, split)
    assert_close(expected, loaded)
    assert find_difference(expected, without) > 0.1, "nothing was loaded, so nothing was compared"


def with_engine(engines: Engines, ranks: int, options: dict[str, Any], examine: Examine, *arguments: Any) -> Any:
    """Return what a function returns for an engine of its own."""
    if ranks == 1:
        return engines.run(1, run_alone, options, examine, *arguments)[0]
    with engines.start(ranks, share_cores(), TINY, **options) as engine:
        return examine(engine, *arguments)


def run_alone(rank: int, options: dict[str, Any], examine: Examine, *arguments: Any) -> Any:
    """Do this with an engine in this process, which has no other: a connector belongs to a process."""
    with pytest.MonkeyPatch.context() as patch:
        for variable, value in {**DECLARED, "VLLM_CPU_OMP_THREADS_BIND": "nobind"}.items():
            patch.setenv(variable, value)
        engine = Engine(TINY, 1, **options)
        try:
            return examine(engine, *arguments)
        finally:
            engine.close()


def run(
    engine: Engine,
    cuts: Sequence[int],
    prompts: Sequence[Any],
    tokens: int,
    arrive: Sequence[int] = (),
    **settings: str,
) -> tuple[list[Answer], list[Steps], int]:
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


def take_steps(engine: Engine) -> list[Steps]:
    """Return the steps of each rank since the last call."""
    found: list[Steps] = engine.llm.collective_rpc("take_steps")
    return found


def examine_all(engine: Engine) -> None:
    examine_calls(engine)
    examine_order(engine)
    examine_failure(engine)


def examine_calls(engine: Engine) -> None:
    """Compare what a connector is told in split steps with what vLLM tells it in unsplit ones."""
    engine.llm.collective_rpc("watch_attention")
    prompts, arrive = [make_prompt(701, 3), *PROMPTS], (0, *MIXED)  # the first is prefilled in chunks
    unsplit, told, split = run(engine, (), prompts, 6, arrive, DBO_MODE="off")
    assert split == 0
    for cuts, check in CUTS:
        answers, steps, split = run(engine, cuts, prompts, 6, arrive, DBO_CHECK=check)
        assert split >= 2
        assert_close(unsplit, answers)
        for of_rank, expected in zip(steps, told, strict=True):
            assert_told_alike(of_rank, expected)
            assert len(list_attending(of_rank)) > len(list_attending(expected)), "no layer attended more than once"


def assert_told_alike(split: Steps, unsplit: Steps) -> None:
    """Check that each step has the calls of an unsplit one, around the attention of all micro-batches."""
    assert len(split) == len(unsplit)
    for own, expected in zip(split, unsplit, strict=True):
        calls = [(what, list(group)) for what, group in groupby(own, key=lambda event: event.what)]
        assert [what for what, _ in calls] == [event.what for event in expected] == [WAIT, ATTEND, SAVE] * LAYERS
        for (what, group), reference in zip(calls, expected, strict=True):
            assert {event.layer for event in group} == {reference.layer}
            assert sum(event.tokens for event in group) == reference.tokens
            if what != ATTEND:
                (event,) = group
                assert event.is_whole
                assert event.saved == pytest.approx(reference.saved, abs=1e-3)


def list_attending(steps: Steps) -> list[Event]:
    return [event for step in steps for event in step if event.what == ATTEND]


def examine_order(engine: Engine) -> None:
    """Ask for an issue order in which a micro-batch is layers ahead."""
    _, _, split = run(engine, (17,), PROMPTS, 1, DBO_POLICY="sequential")
    assert split == 0
    for of_rank in engine.statistics():  # the second of two steps is shorter than the cut
        assert of_rank["declined"]["the KV connector takes one layer after the other"] == 1


def examine_failure(engine: Engine) -> None:
    """Let the second micro-batch fail in the second layer, and serve on."""
    expected, told, _ = run(engine, (17,), PROMPTS[:2], 1)
    second = [*dict.fromkeys(event.layer for event in told[0][0])][1]
    engine.llm.collective_rpc("fail_in", args=(second, 2))
    with pytest.raises(RuntimeError, match="no such kernel"):
        run(engine, (17,), PROMPTS[:2], 1)
    engine.abort_all()
    ((failed, *_),) = take_steps(engine)  # and the recorder is in its place again
    calls = [(event.what, event.layer == second) for event in failed if event.what != ATTEND]
    assert calls == [(WAIT, False), (SAVE, False), (WAIT, True)]
    answers, steps, split = run(engine, (17,), PROMPTS[:2], 1)
    assert split == 1
    assert answers == expected
    assert steps == told


def store_in(folder: Path) -> dict[str, Any]:
    """Return the options with which vLLM's ExampleConnector saves each layer of each prompt, and loads it."""
    extra = {"shared_storage_path": str(folder)}
    transfer = {"kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    return {"kv_transfer_config": transfer, "enable_prefix_caching": False}


def save(engine: Engine, mode: str) -> list[Answer]:
    """Prefill and save, split or not, and generate on."""
    engine.configure(DBO_MODE=mode)
    if mode == "always":
        engine.cut_at(17, 300)
    answers = engine.generate(PROMPTS, 6)
    assert (engine.count_split() > 0) == (mode == "always")
    return answers


def load(engine: Engine, folder: Path) -> tuple[list[Answer], list[Answer]]:
    """Generate from what is saved, and once more when that has been overwritten by zeros."""
    answers = engine.generate(PROMPTS, 6)
    for name, stored in read_stored(folder).items():
        save_file({"kv_cache": torch.zeros_like(stored)}, folder / name)
    return answers, engine.generate(PROMPTS, 6)


def read_stored(folder: Path) -> dict[str, torch.Tensor]:
    """Return what is saved: a tensor for each prompt and layer."""
    files = sorted(folder.rglob("*.safetensors"))
    return {str(file.relative_to(folder)): load_file(file)["kv_cache"] for file in files}
