"""DBO_CHECK=1, and the comparison of first steps, raise no alarm where rounding leads tokens to other experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ascend.false_alarms import cut_at_random, make_models, run_model
from tests.support.ascend.jobs import make_prompts
from tests.support.vllm.engine import Engine
from tests.support.vllm.ranks import Ranks

REPORTED = ((130, 64), (200, 100), (158, 59))  # prompts and cuts of which each was a false alarm
STEPS, MOST = 24, 20  # that are run, and that are split at least: in few, both cuts are too near an end


def answer_first_steps(engine: Engine, rank: int) -> list[Any]:
    """Split prompts whose steps are compared as first ones are; return on each worker why nothing is split any more."""
    engine.configure(DBO_MODE="always", DBO_CHECK="0")
    engine.llm.collective_rpc(compare_first_steps)
    for length, cut in REPORTED:
        engine.cut_at(cut)
        engine.generate(make_prompts(length), 1)
    engine.cut_by_settings()
    return engine.llm.collective_rpc(end_first_steps)


def compare_first_steps(worker: Any) -> None:
    """Compare first steps in a worker, as with an untested version of vLLM."""
    from dbo_runtime.observe.logs import open_log
    from dbo_runtime.vllm_plugin.step.first_steps import FirstSteps

    decider = worker.model_runner.get_model().forward.decider
    worker.first_steps, decider.first_steps = decider.first_steps, FirstSteps(open_log(quiet=True))


def end_first_steps(worker: Any) -> tuple[int, str]:
    """Compare as before; return how many steps were compared, and why splitting ended."""
    decider = worker.model_runner.get_model().forward.decider
    found, decider.first_steps = decider.first_steps, worker.first_steps
    return sum(found._compared.values()), str(found.failure or "")


def test_random_cuts_raise_no_alarm(two_npus: Ranks) -> None:
    (counts,) = two_npus.run(cut_at_random, 0, STEPS, timeout=400)
    assert counts.alarms == ()
    assert counts.split >= MOST
    assert counts.rerouted > 0, "else nothing is shown"


def test_first_steps_whose_tokens_are_rerouted_do_not_end_splitting(two_npus: Ranks) -> None:
    (found,) = two_npus.run(answer_first_steps)
    assert found == [(len(REPORTED), "")] * 2


@pytest.mark.slow
@pytest.mark.parametrize("title", ["Qwen3-MoE, bf16", "DeepSeek V3, W8A8", "Qwen3-MoE, W8A8"])
def test_random_cuts_of_other_weights_raise_no_alarm(title: str, tmp_path: Path) -> None:
    model, options = make_models(tmp_path)[title]
    counts = run_model(model, options, STEPS)
    assert counts.alarms == ()
    assert counts.split >= MOST
