"""`dbo simulate`: what it prints, what it refuses, and the grid that it prices steps from."""

from __future__ import annotations

import json

import pytest

from dbo_runtime import __main__ as program
from dbo_runtime.config import RuntimeConfig
from dbo_runtime.lab.simulate import simulate_command
from dbo_runtime.lab.simulate.comparison import Comparison, Scenario, Trial
from dbo_runtime.lab.simulate.service_level import Capacity, Verdict
from dbo_runtime.lab.simulate.step_times import StepTimes, predict_step_times
from dbo_runtime.lab.whatif.corners import Corner
from dbo_runtime.lab.whatif.published_cases import get_case
from dbo_runtime.planner.costs.batch_features import measure_features
from dbo_runtime.planner.costs.program_spec import build_program
from dbo_runtime.planner.online.predictor import Predictor

pytest.importorskip("simpy")
SHORT = "--costs qwen3-tp4-44677 --chips 4 --output 1 --budget 512 --sequences 4 --imbalance 1 --seeds 2"


@pytest.fixture(scope="module")
def times() -> tuple[StepTimes, StepTimes]:
    settings = RuntimeConfig(micro_batches=2, side="off")
    return predict_step_times(get_case("qwen3-235b-910b").table, settings, 512, 16, 2000, Corner(imbalance=1.3))


def test_points_of_the_grid_are_predictions(times: tuple[StepTimes, StepTimes]) -> None:
    table = get_case("qwen3-235b-910b").table
    predictor = Predictor(build_program(table.program), table)
    features = measure_features((1,) * 16 + (512,), (2000,) * 16 + (1000,))
    assert times[0].price(512, 16)[0] == pytest.approx(predictor.predict_unsplit(features))


def test_prices_grow_with_what_is_in_a_step_and_with_imbalance(times: tuple[StepTimes, StepTimes]) -> None:
    unsplit, decided = times
    assert unsplit.price(0, 0) == decided.price(0, 0) == (0.0, 0.0)
    tokens = [unsplit.price(count, 8) for count in (0, 100, 256, 400, 512, 4096)]
    assert tokens == sorted(tokens)
    for count in (100, 400, 512):
        for even, uneven in (unsplit.price(count, 3), decided.price(count, 3)):
            assert even <= uneven
        assert decided.price(count, 3)[0] <= unsplit.price(count, 3)[0]
    assert decided.price(512, 0)[0] < 0.95 * unsplit.price(512, 0)[0]


@pytest.mark.slow
def test_a_simulation_is_printed_and_repeats_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["simulate", *SHORT.split(), "--ttft", "5"]) == 0
    text = capsys.readouterr().out
    assert "P99 TTFT 5 s; " in text
    assert program.main(["simulate", *SHORT.split(), "--ttft", "5", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["requests_per_second"]["unsplit"][0] > 0
    assert f"{figures['requests_per_second']['unsplit'][1]:.2f} (" in text
    assert len(figures["seeds"]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["r1-tp16-941", "r1-decode-12708"])
def test_a_case_without_dispatch_or_with_more_ranks_needs_no_further_argument(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Scenario] = []
    verdict = Capacity(1.0, Verdict(1.0, 0.1, True))

    def compare(scenario: Scenario, *others: object) -> Comparison:
        seen.append(scenario)
        return Comparison((Trial(verdict, verdict),))

    monkeypatch.setattr(simulate_command, "compare_capacity", compare)  # takes minutes; the defaults are the point
    assert program.main(["simulate", "--costs", name]) == 0
    parallel = get_case(name).table.provenance.parallel
    assert seen[0].layout.ranks == parallel.get("data", 1)
    said = capsys.readouterr().out
    assert f"{name} on {parallel['tensor'] * parallel.get('data', 1)} chips" in said
    assert "requests, 1 seed\n" in said
    assert "gain: 1.00x\n" in said  # one seed has no range


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--costs qwen3-tp4-44677 --budget 0", "--budget"),
        ("--costs qwen3-tp4-44677 --seeds x", "--seeds"),
        ("--costs qwen3-tp4-44677 --ttft nan", "--ttft"),
        ("--costs qwen3-tp4-44677 --prompt 0", "prompt"),
        ("--costs r1-prefill-910b --chips 16", "no room"),
        ("--costs r1-ep16-1589 --chips 1", "--chips"),
        ("--costs nothing", "nothing"),
        ("--costs qwen3-tp4-44677 --requests 20", "too few for a service level of 99%, which one of them would decide"),
        ("--costs qwen3-tp4-44677 --imbalance 1.3", "imbalance"),
    ],
)
def test_what_cannot_be_is_refused_by_its_name(words: str, named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["simulate", *words.split()]) == program.FAILED
    assert named in capsys.readouterr().err


def test_without_simpy_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(program, "find_spec", lambda name: None)
    assert program.main(["simulate", "--costs", "qwen3-tp4-44677"]) == program.FAILED
    assert "needs simpy, which is not installed: pip install 'dbo-runtime[lab]'" in capsys.readouterr().err
