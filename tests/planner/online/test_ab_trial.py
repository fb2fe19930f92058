"""Steps on probation: what measured faster is kept, alike on all ranks, and trials cost little."""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dbo_runtime.decline import Decline
from dbo_runtime.planner.costs.batch_features import BatchFeatures
from dbo_runtime.planner.online.ab_trial import (
    COST_SHARE,
    LEAD_PAIRS,
    MAX_CLASSES,
    REFRESH_STEPS,
    WINDOW_PAIRS,
    AbTrials,
    Proposal,
    TrialClass,
    get_trial_class,
)
from dbo_runtime.planner.online.correction import SPLIT, UNSPLIT
from dbo_runtime.planner.online.prediction import Prediction
from tests.support.profiles import scale

KIND = ("prefill", 2)
GAINS = Prediction(1.0, 0.9, 2, 0.05)
DOUBTED = Prediction(1.0, 0.95, 2, -0.05)
DOUBT = Decline("no gain predicted", "may lose", 1.0, KIND)
EXCHANGE_STEPS = 64


class Rank:
    """A rank that serves steps of known times."""

    def __init__(self, seed: int = 0, noise: float = 0.0) -> None:
        self.trials = AbTrials()
        self._rng = random.Random(seed)
        self._noise = noise

    def run(
        self, prediction: Prediction, doubt: Decline | None, split: float, kind: TrialClass = KIND
    ) -> Decline | None:
        """Serve a step that takes 1 s unsplit and *split* s split; return why it was not split, or None."""
        declined = self.trials.check(kind, prediction, doubt)
        mode, predicted, seconds = (
            (SPLIT, prediction.split, split) if declined is None else (UNSPLIT, prediction.unsplit, 1.0)
        )
        self.trials.observe(kind, mode, predicted, seconds * math.exp(self._rng.gauss(0.0, self._noise)))
        return declined


def serve(
    ranks: Rank | list[Rank], steps: int, prediction: Prediction, split: float, doubt: Decline | None = None
) -> list[Decline | None]:
    """Serve steps on all ranks, which exchange what they measured; return the decisions, which must be alike."""
    ranks = [ranks] if isinstance(ranks, Rank) else ranks
    decisions = []
    for number in range(1, steps + 1):
        decision, *others = (rank.run(prediction, doubt, split) for rank in ranks)
        assert all(other == decision for other in others)
        decisions.append(decision)
        if number % EXCHANGE_STEPS == 0:
            exchange(ranks)
    return decisions


def exchange(ranks: Iterable[Rank]) -> None:
    proposals = [rank.trials.propose() for rank in ranks]
    for rank in ranks:
        rank.trials.apply(proposals)


def learn(trials: AbTrials, pairs: list[float], kind: TrialClass = KIND) -> None:
    """Let ranks agree on these pairs of a kind."""
    trials.check(kind, GAINS, None)
    for number in range(len(pairs)):
        trials.observe(kind, UNSPLIT, 1.0, 1.0)
        trials.observe(kind, SPLIT, 1.0, math.exp(pairs[number]))
    trials.apply([trials.propose()])


@pytest.mark.parametrize("doubt", [None, DOUBT])
def test_what_is_not_timed_stays_with_the_prediction(doubt: Decline | None) -> None:
    probation = AbTrials()
    for _ in range(1000):
        assert probation.check(KIND, GAINS, doubt) is doubt
        probation.apply([probation.propose(), Proposal(True, {})])


def test_a_split_that_measures_slower_is_given_up_with_the_figures() -> None:
    decisions = serve(Rank(), 4000, GAINS, split=1.1)
    last = decisions[-2]
    assert last is not None
    assert (last.reason, last.expected, last.trial_class) == ("measured slower split", GAINS.unsplit, KIND)
    figures = re.fullmatch(
        r"10\.0% longer than unsplit; in (\d+) of (\d+) pairs of steps splitting was slower", last.detail
    )
    assert figures is not None
    assert LEAD_PAIRS <= int(figures[1]) == int(figures[2]) <= WINDOW_PAIRS
    assert decisions[-200:].count(None) <= 200 / REFRESH_STEPS + 1


def test_a_split_that_measures_faster_is_kept_though_it_was_in_doubt() -> None:
    decisions = serve(Rank(), 4000, DOUBTED, split=0.9, doubt=DOUBT)
    assert decisions[:EXCHANGE_STEPS] == [DOUBT] * EXCHANGE_STEPS  # until ranks know that steps are timed
    assert decisions[-200:].count(None) >= 200 - 200 / REFRESH_STEPS - 1


def test_a_split_that_gains_as_predicted_stays() -> None:
    decisions = serve(Rank(), 4000, GAINS, split=0.9)
    trials = [declined for declined in decisions if declined is not None]
    assert {declined.reason for declined in trials} == {"on probation"}
    assert len(trials) >= LEAD_PAIRS


def test_what_changes_is_noticed() -> None:
    rank = Rank()
    serve(rank, 4000, GAINS, split=0.9)
    decisions = serve(rank, REFRESH_STEPS * 2 * WINDOW_PAIRS, GAINS, split=1.1)
    assert decisions[-200:].count(None) <= 200 / REFRESH_STEPS + 1


@settings(max_examples=scale(50))
@given(st.floats(0.001, 0.5), st.integers(1, 3000))
def test_a_split_that_takes_what_is_predicted_is_left_rarely(gain: float, steps: int) -> None:
    decisions = serve(Rank(), steps, Prediction(1.0, 1 - gain, 2, 0.0), 1 - gain)
    trials = sum(declined is not None for declined in decisions)
    assert trials <= LEAD_PAIRS + steps / REFRESH_STEPS


def test_how_often_a_split_is_tried_does_not_depend_on_how_long_steps_take() -> None:
    def count_trials(seconds: float) -> int:
        prediction = Prediction(seconds, 1.1 * seconds, 2, -0.1)
        return serve(Rank(), 2000, prediction, split=1.1, doubt=DOUBT).count(None)

    assert count_trials(0.25) == count_trials(4.0) > 0


@settings(max_examples=scale(50))
@given(st.floats(0.001, 2.0), st.lists(st.integers(0, 2), min_size=1, max_size=2000))
def test_trials_of_splitting_lose_no_more_than_the_share_of_each_kind(loss: float, kinds: list[int]) -> None:
    """Whatever other kinds run, a split that loses what it is predicted to lose is tried for no more than this."""
    prediction = Prediction(4.0, 4.0 * (1.0 + loss), 2, -loss)
    rank = Rank()
    splits: Counter[int] = Counter()
    for number, kind in enumerate(kinds, 1):
        splits[kind] += rank.run(prediction, DOUBT, 1.0 + loss, kind) is None
        if number % EXCHANGE_STEPS == 0:
            exchange([rank])
    for kind, count in splits.items():
        assert count * loss <= COST_SHARE * kinds.count(kind) * 1.001


def test_a_kind_that_seldom_runs_is_not_tried_at_the_expense_of_another() -> None:
    rank = Rank()
    serve(rank, 2000, GAINS, split=0.9)
    losing = Prediction(1.0, 1.5, 2, -0.5)
    assert all(rank.run(losing, DOUBT, 1.5, "seldom") is DOUBT for _ in range(int(0.5 / COST_SHARE) - 1))
    serve(rank, EXCHANGE_STEPS, GAINS, split=0.9)
    assert rank.run(losing, DOUBT, 1.5, "seldom") is None


@pytest.mark.parametrize("noise", [0.01, 0.05, 0.2])
@pytest.mark.parametrize("split", [0.8, 0.9, 1.0, 1.1, 1.3])
def test_noise_costs_little(noise: float, split: float) -> None:
    """Whatever the truth, what is served is at most a few percent slower than the better way, and rarely that."""
    losses = []
    for seed in range(scale(40)):
        decisions = serve(Rank(seed, noise), 3000, GAINS, split)
        served = sum(1.0 if declined else split for declined in decisions[1500:]) / 1500
        losses.append(served / min(split, 1.0) - 1)
    assert sum(losses) / len(losses) <= 0.01 + noise / 5


def test_an_outlier_counts_once() -> None:
    probation = AbTrials()
    learn(probation, [5.0, *[-0.5] * (LEAD_PAIRS + 1)])
    assert probation.check(KIND, Prediction(1.0, 1.2, 2), DOUBT) is None


@pytest.mark.parametrize(("pair", "splits"), [(0.05, True), (0.15, False)])
def test_pairs_are_relative_to_what_is_predicted(pair: float, splits: bool) -> None:
    """Steps of a kind differ: by the same pairs one of large gain is split, and one of small gain is not."""
    probation = AbTrials()
    learn(probation, [pair] * LEAD_PAIRS)
    declined = probation.check(KIND, Prediction(1.0, math.exp(-0.1), 2), None)
    assert (declined is None) == splits
    assert declined is None or declined.reason == "measured slower split"


def test_kinds_are_apart() -> None:
    probation = AbTrials()
    learn(probation, [0.5] * LEAD_PAIRS)
    assert probation.check(KIND, GAINS, None) is not None
    assert probation.check("another", GAINS, None) is None


def test_only_kinds_met_last_are_kept() -> None:
    probation = AbTrials()
    learn(probation, [0.5] * LEAD_PAIRS)
    for number in range(MAX_CLASSES - 1):
        probation.check(number, GAINS, None)
    assert probation.check(KIND, GAINS, None) is not None
    for number in range(MAX_CLASSES):
        probation.check(number, GAINS, None)
    assert len(probation._records) == MAX_CLASSES
    probation.observe(KIND, SPLIT, 1.0, 1.0)  # of a step that ran before it was forgotten
    assert probation.check(KIND, GAINS, None) is None


@pytest.mark.parametrize(
    ("predicted", "measured"), [(0.0, 1.0), (1.0, 0.0), (-1.0, 1.0), (1.0, math.inf), (math.inf, 1.0)]
)
def test_what_is_no_time_is_not_learnt(predicted: float, measured: float) -> None:
    probation = AbTrials()
    probation.check(KIND, GAINS, None)
    probation.observe(KIND, SPLIT, predicted, measured)
    assert probation.propose() == Proposal(False, {})


@settings(max_examples=scale(50))
@given(st.integers(2, 4), st.floats(0.7, 1.3), st.sampled_from([(GAINS, None), (DOUBTED, DOUBT)]), st.integers(0, 99))
def test_ranks_that_measure_differently_decide_alike(
    count: int, split: float, case: tuple[Prediction, Decline | None], seed: int
) -> None:
    ranks = [Rank(seed + number, noise=0.1) for number in range(count)]
    serve(ranks, 1000, case[0], split, case[1])


@given(st.lists(st.integers(0, 6), min_size=2, max_size=4))
def test_of_ranks_that_are_behind_the_pairs_count_that_all_have(behind: list[int]) -> None:
    """A device may be behind its host, by another number of steps on each rank; what it has measured is kept."""
    probations = [AbTrials() for _ in behind]
    for probation, late in zip(probations, behind, strict=True):
        probation.check(KIND, GAINS, None)
        for _ in range(10 - late):
            probation.observe(KIND, UNSPLIT, 1.0, 1.0)
            probation.observe(KIND, SPLIT, 1.0, 1.5)
    proposals = [probation.propose() for probation in probations]
    for probation, late in zip(probations, behind, strict=True):
        probation.apply(proposals)
        assert len(probation._records[KIND].pairs) == 10 - max(behind)
        assert len(probation.propose().pairs.get(repr(KIND), ())) == max(behind) - late


def test_steps_of_a_kind_are_about_as_large_and_alike_prefills_or_decodes() -> None:
    prompt, longer = BatchFeatures(1000, 3e5, prefills=1), BatchFeatures(1400, 5.6e5, prefills=1)
    assert get_trial_class(prompt, GAINS, ("optimal", 0)) == get_trial_class(longer, GAINS, ("optimal", 0))
    others = (
        get_trial_class(prompt._replace(tokens=4000), GAINS, ("optimal", 0)),
        get_trial_class(prompt._replace(context_pairs=8e6), GAINS, ("optimal", 0)),
        get_trial_class(prompt._replace(decodes=1.0), GAINS, ("optimal", 0)),
        get_trial_class(BatchFeatures(1000, decodes=1000.0, decode_pairs=3e5), GAINS, ("optimal", 0)),
        get_trial_class(prompt, GAINS._replace(micro_batches=3), ("optimal", 0)),
        get_trial_class(prompt, GAINS._replace(side_ops=("keys",)), ("optimal", 0)),
        get_trial_class(prompt, GAINS, ("alternate", 0)),
    )
    assert len({get_trial_class(prompt, GAINS, ("optimal", 0)), *others}) == len(others) + 1


@pytest.mark.parametrize(("gain", "splits"), [(0.01, False), (0.03, True)])
def test_what_is_in_doubt_must_measure_faster_by_more_than_the_margin(gain: float, splits: bool) -> None:
    probation = AbTrials()
    learn(probation, [math.log((1 - gain) / DOUBTED.split)] * LEAD_PAIRS)
    declined = probation.check(KIND, DOUBTED, DOUBT, margin=0.02)
    assert declined is (None if splits else DOUBT)


def test_a_margin_of_all_the_time_is_never_gained() -> None:
    probation = AbTrials()
    learn(probation, [-5.0] * LEAD_PAIRS)
    declined = probation.check(KIND, GAINS, None, margin=1.0)
    assert declined is not None
    assert declined.reason == "measured slower split"


def test_an_unsplit_step_is_tried_at_once_for_it_costs_nothing() -> None:
    probation = AbTrials()
    learn(probation, [0.0])
    decisions = [probation.check(KIND, GAINS, None) for _ in range(2)]
    assert [declined and declined.reason for declined in decisions] == ["on probation", None]


def test_what_corrections_have_learnt_is_not_counted_twice() -> None:
    """Pairs are of uncorrected predictions: that all split steps take longer, a corrected one says already."""
    probation = AbTrials()
    learn(probation, [math.log(1.2)] * LEAD_PAIRS)
    corrected = Prediction(1.0, 0.9 * 1.2, 2)
    assert probation.check(KIND, corrected, None, correction=1.2) is not None
    assert probation.check(KIND, corrected._replace(split=0.8 * 1.2), None, correction=1.2) is None
