"""What was not compared inside vllm-ascend is split, and its first steps are compared: models, weights and drafters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dbo_runtime.vllm_plugin.step.first_steps import COMPARED_STEPS
from tests.support.ascend.drafts import assert_drafts_are_equal, leave_backend
from tests.support.ascend.engines import TINY, start
from tests.support.ascend.equivalence import (
    PROMPTS,
    assert_data_parallel_prefills_are_close,
    assert_mixed_steps_are_equal,
)
from tests.support.ascend.families import OPTIONS_OF
from tests.support.ascend.jobs import answer, answer_in_nano_batches
from tests.support.ascend.modelslim import quantize_model
from tests.support.vllm.drafters import draft_by_mtp
from tests.support.vllm.engine import Engine, find_difference
from tests.support.vllm.families import make_family
from tests.support.vllm.ranks import Ranks

COMPARES = "not proven with this platform yet: first steps are compared with unsplit ones"
DIFFERS = "the first split steps differ from unsplit ones"
CUT = [45]  # between the second request and the third
SHARED_OUT = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
NOTHING = """
from dbo_runtime.vllm_plugin.api import known
known.PROVEN_ON_ASCEND = {release: known.Proven(()) for release in known.PROVEN_ON_ASCEND}
"""


@pytest.fixture(autouse=True)
def _nothing_is_proven(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty the list of what is proven in all processes that a test starts."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "sitecustomize.py").write_text(NOTHING)
    monkeypatch.setenv("PYTHONPATH", str(folder))


def test_an_unproven_model_is_split_and_its_first_steps_are_compared(capfd: pytest.CaptureFixture[str]) -> None:
    """All further ones are equal to the bit as well, in micro-batches and in nano-batches."""
    for npus in start(1, **SHARED_OUT):
        assert_compared_steps_are_equal(npus)
        ((unsplit, _),) = npus.run(answer, [PROMPTS], 3)
        for _ in range(COMPARED_STEPS + 1):
            ((nano, steps),) = npus.run(answer_in_nano_batches, [PROMPTS], 3, 2)
            assert min(steps) == 3, steps
            assert find_difference(unsplit, nano) == 0.0
        ((one, other),) = npus.run(count_compared)
        assert one == other, "ranks count alike"
        assert (len(one[0]) > 1, max(one[0]), one[1]) == (True, COMPARED_STEPS, None)
    logged = capfd.readouterr().err
    assert COMPARES in logged
    assert "unproven=model DeepseekV3ForCausalLM " in logged


def test_a_wrong_op_of_an_unproven_model_ends_splitting_and_no_answer_is_wrong() -> None:
    for npus in start(1, **SHARED_OUT):
        ((unsplit, _),) = npus.run(answer, [PROMPTS])
        npus.run(plant_wrong_op)
        ((first, counts),) = npus.run(answer, [PROMPTS], 1, CUT)
        assert [count["split"] for count in counts] == [1, 1], "the step that is compared"
        assert find_difference(unsplit, first) == 0.0, "it answers as unsplit"
        for _, failure in npus.run(count_compared)[0]:
            assert failure is not None
            assert failure.startswith(DIFFERS)
        ((further, counts),) = npus.run(answer, [PROMPTS], 1, CUT)
        assert counts == [{"split": 0, "declined": {DIFFERS: 1}}] * 2
        assert find_difference(unsplit, further) == 0.0


@pytest.mark.slow
def test_unproven_weights_are_compared(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for npus in start(1, quantize_model(TINY, tmp_path / "quantized"), quantization="ascend", **SHARED_OUT):
        assert_compared_steps_are_equal(npus)
    assert "quantized weights W8A8, W8A8_DYNAMIC" in capfd.readouterr().err


@pytest.mark.slow
def test_an_unproven_drafter_is_compared(capfd: pytest.CaptureFixture[str]) -> None:
    for npus in start(1, **SHARED_OUT, **leave_backend(draft_by_mtp(2))):
        assert_compared_steps_are_equal(npus)
        assert_drafts_are_equal(npus, accepts=False)
    assert "drafter deepseek_mtp" in capfd.readouterr().err


@pytest.mark.slow
def test_states_of_linear_attention_are_those_of_one_run(tmp_path: Path) -> None:
    """A compared step runs twice, and the second run begins with the states that the first began with."""
    name = "Qwen3NextForCausalLM"
    for npus in start(1, make_family(name, tmp_path), **SHARED_OUT, **OPTIONS_OF[name]):
        assert_compared_steps_are_equal(npus)
        assert_mixed_steps_are_equal(npus)


@pytest.mark.slow
def test_data_parallel_ranks_compare_the_same_steps() -> None:
    """The second rank has fewer tokens, and dispatches them to experts of both in each run of a step."""
    for npus in start(2):
        assert_data_parallel_prefills_are_close(npus, 0.0, cuts=[70] * (COMPARED_STEPS + 1))
        first, second = npus.run(count_compared)
        assert first == second == [([COMPARED_STEPS], None)]


def assert_compared_steps_are_equal(npus: Ranks) -> None:
    """Compare steps that are split with unsplit ones, the first of which are compared by this package, too."""
    ((unsplit, _),) = npus.run(answer, [PROMPTS])
    for _ in range(COMPARED_STEPS + 1):
        ((split, counts),) = npus.run(answer, [PROMPTS], 1, CUT)
        assert all(count["split"] == 1 for count in counts), counts
        assert find_difference(unsplit, split) == 0.0
    for compared, failure in npus.run(count_compared)[0]:
        assert (compared, failure) == ([COMPARED_STEPS], None)


def count_compared(engine: Engine, rank: int) -> list[tuple[list[int], str | None]]:
    """Return, for each worker, how many steps of each class were compared, and why nothing is split any more."""
    found: list[tuple[list[int], str | None]] = engine.llm.collective_rpc(_count_compared)
    return found


def _count_compared(worker: Any) -> tuple[list[int], str | None]:
    first_steps = worker.model_runner.get_model().forward.decider.first_steps
    failure = first_steps.failure
    return list(first_steps._compared.values()), None if failure is None else str(failure)


def plant_wrong_op(engine: Engine, rank: int) -> None:
    """Make an op of the first layer wrong, but only while this package runs it."""
    engine.llm.collective_rpc(_plant_wrong_op)


def _plant_wrong_op(worker: Any) -> None:
    from dbo_runtime.engine.runtime import MicroBatchRuntime

    run, running = MicroBatchRuntime.run, []

    def run_marked(*arguments: Any) -> Any:
        running.append(True)
        try:
            return run(*arguments)
        finally:
            running.pop()

    def double(module: Any, inputs: Any, output: Any) -> Any:
        return (output[0] * 2, output[1]) if running else output

    worker.model_runner.get_model().model.layers[0].post_attention_layernorm.register_forward_hook(double)
    MicroBatchRuntime.run = run_marked  # type: ignore[method-assign]  # for as long as the worker lives
