"""Steps that are planned by costs: split where and as often as the planner says, with the answers of unsplit ones."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dbo_runtime.batch import Batch
from dbo_runtime.config import RuntimeConfig
from dbo_runtime.engine.executor_cache import ExecutorCache
from dbo_runtime.engine.statistics import Statistics
from dbo_runtime.planner.costs.batch_features import measure_features
from dbo_runtime.planner.online.correction import PERIOD_STEPS, SPLIT
from dbo_runtime.planner.online.planner import Planner
from dbo_runtime.planner.online.split_choice import SplitChoice
from dbo_runtime.vllm_plugin.step.forward import SplitForward
from tests.support.vllm.costs import Lines, calibrate_few, forget_costs, make_planner
from tests.support.vllm.engine import Engine, make_prompt
from tests.support.vllm.engines import find_transport
from tests.support.vllm.equivalence import MIXED, PROMPTS, assert_close, run_unsplit
from tests.support.vllm.transport import set_transport

PAIR = [make_prompt(64, 1), make_prompt(64, 2)]
LOSING = 20e-3  # seconds that a split costs: a little more than is gained of the 23 ms in which PAIR communicates


@pytest.fixture
def forward(one_rank: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[SplitForward]:
    """Return the forward of the served model, which counts and makes plans anew; afterwards it has no costs again."""
    forward: SplitForward = one_rank.runner.get_model().forward
    runtime = forward.runtime
    monkeypatch.setattr(runtime, "statistics", Statistics())
    monkeypatch.setattr(runtime, "_executors", ExecutorCache(runtime.device, runtime.log, 1, runtime.events))
    yield forward
    forward.runtime.planner = None
    one_rank.configure()


@pytest.fixture
def log(forward: SplitForward, monkeypatch: pytest.MonkeyPatch) -> Lines:
    """Return what is logged of plans and declines."""
    lines = Lines()
    monkeypatch.setattr(forward.runtime, "log", lines)
    monkeypatch.setattr(
        forward.runtime, "_executors", ExecutorCache(forward.runtime.device, lines, 1, forward.runtime.events)
    )
    return lines


@pytest.fixture
def networked(one_rank: Engine, forward: SplitForward, monkeypatch: pytest.MonkeyPatch) -> SplitForward:
    """Return the forward in mode auto, as if other ranks were on other hosts."""
    monkeypatch.setattr(forward.decider, "_transport", "network")
    one_rank.configure(DBO_MODE="auto")
    return forward


@pytest.fixture(scope="module")
def measured(one_rank: Engine) -> Planner:
    """Return a planner of the costs that calibration finds."""
    one_rank.llm.collective_rpc(calibrate_few)
    planner: Planner = one_rank.runner.get_model().forward.runtime.planner
    one_rank.llm.collective_rpc(forget_costs)
    return Planner(planner.program, planner.table)


LOADS: dict[str, tuple[list[list[int]], int, tuple[int, ...]]] = {
    "several prompts": (PROMPTS, 1, ()),
    "decodes": (PROMPTS, 5, ()),
    "one prompt, which is cut inside": ([make_prompt(701, 3)], 1, ()),
    "prompts that arrive during decodes": (PROMPTS, 6, MIXED),
}


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("parts", ["auto", "3"])
def test_steps_split_by_measured_costs_answer_as_unsplit_ones(
    one_rank: Engine, forward: SplitForward, measured: Planner, load: str, parts: str
) -> None:
    prompts, tokens, arrive = LOADS[load]
    unsplit = run_unsplit(one_rank, prompts, tokens, arrive)
    forward.runtime.planner = measured
    one_rank.configure(DBO_MICRO_BATCHES=parts)
    forward.runtime.statistics = Statistics()
    split = one_rank.generate(prompts, tokens, arrive)
    assert_close(unsplit, split)
    assert forward.runtime.statistics.split > 0
    assert "no gain predicted" not in forward.runtime.statistics.declined


def test_every_step_split_by_costs_passes_the_check(one_rank: Engine, forward: SplitForward, measured: Planner) -> None:
    forward.runtime.planner = measured
    one_rank.configure(DBO_CHECK="1")
    one_rank.generate(PROMPTS, 4, MIXED)
    assert forward.runtime.statistics.split >= 4


def test_a_plan_is_the_planners_choice(
    one_rank: Engine, forward: SplitForward, log: Lines, measured: Planner, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = []
    run = forward.runtime.run
    monkeypatch.setattr(forward.runtime, "run", lambda plan, *rest: plans.append(plan) or run(plan, *rest))
    forward.runtime.planner = measured
    one_rank.generate(PAIR)
    choice = measured.choose(Batch((64, 64), 128, context_lens=(0, 0)), forward.runtime.config)
    assert isinstance(choice, SplitChoice)
    (plan,) = plans
    assert (plan.slices, plan.expected) == (choice.slices, choice.prediction.split)
    (line,) = log.find("new plan")
    assert (line["micro_batches"], line["digest"]) == (len(choice.slices), plan.digest)
    assert plan.executor is forward.runtime._executors._executors[plan.digest]


@pytest.mark.parametrize(("fixed", "parts"), [(0.0, 3), (2e-3, 2)])
def test_steps_are_split_as_often_as_pays_most(
    one_rank: Engine, forward: SplitForward, fixed: float, parts: int
) -> None:
    """Where nothing is paid twice, three parts hide more than two; with a fixed cost of each part, two gain more."""
    unsplit = run_unsplit(one_rank, PAIR)
    forward.runtime.planner = make_planner(forward.runtime.program, fixed)
    forward.runtime.statistics = Statistics()
    assert_close(unsplit, one_rank.generate(PAIR))
    assert forward.runtime.statistics.as_dict() == {
        "split": 1,
        "nano": 0,
        "concurrent": 0,
        "micro_batches": parts,
        "declined": {},
    }


def test_on_one_rank_auto_has_nothing_to_hide_whatever_costs_say(
    one_rank: Engine, forward: SplitForward, log: Lines
) -> None:
    forward.runtime.planner = make_planner(forward.runtime.program)
    one_rank.configure(DBO_MODE="auto")
    one_rank.generate(PAIR, 3)
    assert forward.runtime.statistics.as_dict() == {
        "split": 0,
        "nano": 0,
        "concurrent": 0,
        "micro_batches": 0,
        "declined": {"no communication to hide": 3},
    }


def test_auto_splits_where_costs_say_that_it_pays(one_rank: Engine, networked: SplitForward) -> None:
    """The thresholds would have left so small a step unsplit."""
    unsplit = run_unsplit(one_rank, PAIR)
    one_rank.configure(DBO_MODE="auto")
    one_rank.generate(PAIR)
    assert networked.runtime.statistics.declined["fewer tokens than DBO_MIN_TOKENS"] == 1
    networked.runtime.planner = make_planner(networked.runtime.program)
    assert_close(unsplit, one_rank.generate(PAIR))
    assert networked.runtime.statistics.split == 1


def test_auto_leaves_unsplit_what_costs_say_does_not_pay_and_logs_the_figures_once(
    one_rank: Engine, networked: SplitForward, log: Lines
) -> None:
    planner = networked.runtime.planner = make_planner(networked.runtime.program, split=LOSING)
    for _ in range(3):
        one_rank.generate(PAIR)
    assert networked.runtime.statistics.as_dict() == {
        "split": 0,
        "nano": 0,
        "concurrent": 0,
        "micro_batches": 0,
        "declined": {"no gain predicted": 3},
    }
    (line,) = log.find("step not split")
    figures = r"\d+\.\d\d ms unsplit, \d+\.\d\d ms in 3 micro-batches: \d+\.\d% more \(\d+\.\d% more if costs are off\)"
    assert re.fullmatch(rf"{figures}; DBO_MARGIN asks for more than 2\.0% less, .*", line["detail"])
    assert networked.observer.last_step is not None
    assert networked.observer.last_step.mode == "unsplit"
    assert networked.observer.last_step.expected == pytest.approx(
        planner.predict_unsplit(measure_features((64, 64), ())), rel=1e-6
    )


def test_auto_does_not_even_look_at_a_step_that_is_too_small_to_gain(
    one_rank: Engine, networked: SplitForward, log: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    networked.runtime.planner = make_planner(networked.runtime.program, split=LOSING)
    monkeypatch.setattr(networked.decider.splitter, "read_batch", None)  # calling it is an error
    one_rank.generate([make_prompt(60)])
    (line,) = log.find("step not split")
    assert line["reason"] == "no gain predicted"
    assert re.match(r"60 tokens have at most 10\.80 ms to hide, and splitting costs at least 20\.00 ms", line["detail"])


def test_the_margin_says_how_much_must_be_gained(one_rank: Engine, networked: SplitForward, log: Lines) -> None:
    networked.runtime.planner = make_planner(networked.runtime.program)
    one_rank.configure(DBO_MODE="auto", DBO_MARGIN="0.9")
    one_rank.generate(PAIR)
    one_rank.configure(DBO_MODE="auto", DBO_MARGIN="0.1")
    one_rank.generate(PAIR)
    assert networked.runtime.statistics.split == 1
    (line,) = log.find("step not split")
    assert "DBO_MARGIN asks for more than 90.0% less" in line["detail"]


def test_always_splits_what_costs_say_does_not_pay_and_off_splits_nothing(
    one_rank: Engine, forward: SplitForward
) -> None:
    forward.runtime.planner = make_planner(forward.runtime.program, split=LOSING)
    one_rank.generate(PAIR)
    one_rank.configure(DBO_MODE="off")
    one_rank.generate(PAIR)
    assert forward.runtime.statistics.as_dict() == {
        "split": 1,
        "nano": 0,
        "concurrent": 0,
        "micro_batches": 3,
        "declined": {"DBO_MODE is off": 1},
    }


def test_cuts_from_outside_come_before_the_planners(one_rank: Engine, forward: SplitForward) -> None:
    forward.runtime.planner = make_planner(forward.runtime.program)
    one_rank.cut_at(30, 60, 90)
    try:
        one_rank.generate(PAIR)
    finally:
        one_rank.cut_by_settings()
    assert forward.runtime.statistics.micro_batches == 4
    assert forward.observer.last_step is not None
    assert (forward.observer.last_step.mode, forward.observer.last_step.expected) == ("split", None)


def ask(engine: Engine, method: str, *arguments: Any) -> Any:
    (answer,) = engine.llm.collective_rpc(method, args=arguments)
    return answer


def test_a_worker_tells_what_its_last_step_was_expected_to_take_and_took(
    one_rank: Engine, forward: SplitForward
) -> None:
    one_rank.configure(DBO_MODE="off")
    one_rank.generate(PAIR)
    unsplit = ask(one_rank, "dbo_last_step")
    assert (unsplit["mode"], unsplit["expected"]) == ("unsplit", None)
    assert unsplit["seconds"] > 0
    one_rank.configure()
    planner = forward.runtime.planner = make_planner(forward.runtime.program)
    one_rank.generate(PAIR)
    split = ask(one_rank, "dbo_last_step")
    choice = planner.choose(Batch((64, 64), 128, context_lens=(0, 0)), forward.runtime.config)
    assert isinstance(choice, SplitChoice)
    assert (split["mode"], split["expected"]) == ("split", choice.prediction.split)
    assert split["seconds"] > 0


def test_a_worker_predicts_steps(one_rank: Engine, forward: SplitForward) -> None:
    assert ask(one_rank, "dbo_predict", [64, 64]) is None  # there are no costs
    planner = forward.runtime.planner = make_planner(forward.runtime.program, split=LOSING)
    one_rank.configure(DBO_MODE="off")  # it is no matter
    predicted = ask(one_rank, "dbo_predict", [64, 64])
    choice = planner.choose(Batch((64, 64), 128), RuntimeConfig(enabled=True, mode="always"))
    assert isinstance(choice, SplitChoice)
    assert predicted.pop("side_ops") == choice.prediction.side_ops
    wanted = choice.prediction._asdict()
    assert predicted == pytest.approx({name: wanted[name] for name in predicted}, rel=1e-6)
    assert (
        predicted["split"]
        > predicted["unsplit"]
        == pytest.approx(planner.predict_unsplit(measure_features((64, 64), ())), rel=1e-6)
    )
    assert ask(one_rank, "dbo_predict", [1]) is None  # it cannot be cut


@pytest.mark.slow
def test_ranks_plan_and_learn_alike(two_ranks: Engine, tmp_path: Path) -> None:
    unsplit = run_unsplit(two_ranks, PROMPTS, 6, MIXED)
    try:
        two_ranks.llm.collective_rpc(calibrate_few)
        two_ranks.configure(DBO_CHECK="1")  # ranks compare what they are about to do, in each step
        before = two_ranks.count_split()
        assert_close(unsplit, two_ranks.generate(PROMPTS, 6, MIXED))
        assert two_ranks.count_split() >= before + 6
        two_ranks.llm.collective_rpc(set_transport, args=("network",))
        two_ranks.configure(DBO_CHECK="1", DBO_MODE="auto")
        assert_close(unsplit, two_ranks.generate(PROMPTS, 6, MIXED))
        two_ranks.configure()
        two_ranks.llm.collective_rpc(plan_by_paying_costs)
        two_ranks.generate(PAIR, PERIOD_STEPS)
        first, second = two_ranks.llm.collective_rpc(tell_correction)
    finally:
        two_ranks.llm.collective_rpc(set_transport, args=(find_transport(),))
        two_ranks.llm.collective_rpc(forget_costs)
        two_ranks.configure()
    assert first == second
    assert first[SPLIT] != 1.0


def plan_by_paying_costs(worker: Any) -> None:
    runtime = worker.model_runner.get_model().forward.runtime
    runtime.planner = make_planner(runtime.program)


def tell_correction(worker: Any) -> dict[str, float]:
    correction = worker.model_runner.get_model().forward.runtime.planner.memory.correction
    return {"steps": correction._steps, **{mode: correction.factor(mode) for mode in ("unsplit", "split")}}
