"""What a report says, what counts as vLLM's own, and what the command refuses."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from dataclasses import replace

import pytest

from dbo_runtime import __main__ as program
from dbo_runtime.errors import ConfigError
from dbo_runtime.lab.soak import check, judge
from dbo_runtime.lab.soak.answer import Answer, Completion, Counts
from dbo_runtime.lab.soak.comparison import Difference
from dbo_runtime.lab.soak.judge import (
    contradicts_itself,
    find_own_differences,
    is_own,
    starts_from_others,
)
from dbo_runtime.lab.soak.report import Bug, EquivalenceReport, Tally
from dbo_runtime.lab.soak.request import Abilities, Prompt, Request, Round

REQUEST = Request(Prompt(4, 0), {"temperature": 0.0, "max_tokens": 1, "logprobs": 1}, arrives=2)


def make_report(*tallies: Tally) -> EquivalenceReport:
    return EquivalenceReport("model", check.PLAIN, 3, "dbo soak model --rounds ROUND", list(tallies))


def make_tally(**fields: object) -> Tally:
    counts = Counts(split=5, micro_batches=10, declined=Counter({"nowhere to cut": 2}), preempted=4)
    return replace(Tally(2, requests=9, equal=8, ties=1, counts=counts), **fields)


def test_a_report_with_split_steps_and_no_bug_is_true() -> None:
    report = make_report(make_tally())
    assert report
    assert "5 split in 10 parts, 0 in nano-batches, 2 unsplit; 4 preemptions" in str(report)
    assert "8 equal, 1 ties, 0 vLLM's own, 0 bugs" in str(report)
    assert "nowhere to cut (2)" in str(report)
    assert str(report).endswith("equivalent")


def test_where_nothing_was_split_nothing_was_compared() -> None:
    report = make_report(make_tally(), make_tally(micro_batches=3, counts=Counts()))
    assert not report
    assert "FAILED: no step was split into 3 micro-batches" in str(report)


def test_steps_in_nano_batches_are_compared_as_well() -> None:
    report = make_report(make_tally(counts=Counts(nano=3)))
    assert report
    assert "0 split in 0 parts, 3 in nano-batches, 0 unsplit" in str(report)
    assert report.as_dict()["micro_batches"][0]["nano"] == 3


def test_a_failed_engine_is_no_answer() -> None:
    bug = Bug(2, 7, None, None, Difference("failure", None, None, "vLLM's process (rank 0) has died."))
    text = str(make_report(make_tally(bugs=[bug])))
    assert "round 7, 2 micro-batches: failure: vLLM's process (rank 0) has died." in text
    assert text.endswith("FAILED: a split step failed")


def test_a_bug_is_told_with_what_repeats_it() -> None:
    bug = Bug(2, 7, 11, REQUEST, Difference("token", 0, 3, "1 / 2"))
    report = make_report(make_tally(bugs=[bug]))
    assert not report
    text = str(report)
    assert "round 7, request 11, 2 micro-batches: token of answer 0 at token 3: 1 / 2" in text
    assert "dbo soak model --rounds 7" in text
    assert str(REQUEST) in text
    facts = json.loads(json.dumps(report.as_dict()))
    assert facts["micro_batches"][0]["bugs"][0]["difference"]["detail"] == "1 / 2"
    assert facts["micro_batches"][0]["declined"] == {"nowhere to cut": 2}


def test_an_alarm_of_first_steps_is_a_bug() -> None:
    bug = Bug(2, 1, None, None, Difference("alarm", None, None, "split steps differ"))
    report = make_report(make_tally(bugs=[bug]))
    assert not report
    assert "round 1, 2 micro-batches: alarm: split steps differ" in str(report)
    assert str(report).endswith("FAILED: the comparison of first steps has ended splitting")


def test_the_command_that_repeats_a_round_has_all_that_was_asked_for() -> None:
    options = {"enable_prefix_caching": False, "kv_transfer_config": {"kv_role": "kv_both"}, "dtype": "bfloat16"}
    setup = check.Setup("model", {"DBO_CHECK": "1"}, 96, 3, (), ["a"], 0.25, True, True, options)
    command = setup.format_command()
    assert command.startswith("DBO_CHECK=1 dbo soak model --requests 96 --seed 3 --lora a --tolerance 0.25")
    assert " --calibrate-between --first-steps --no-enable-prefix-caching --kv-transfer-config " in command
    assert shlex.split(command)[-5:] == ['{"kv_role": "kv_both"}', "--dtype", "bfloat16", "--rounds", "ROUND"]
    assert "--calibrate-between" not in check.Setup("model").format_command()


def test_what_is_pooled_is_no_contradiction_and_its_rows_are_counted() -> None:
    request = Request(Prompt(4, 0), {}, pooling={"task": "embed"})
    pooled = Answer(pooled=[[1.0, 2.0]])
    assert not contradicts_itself(request, pooled, 1e-4)
    tally = Tally(2)
    tally.note_answers(Round(0, "0/0", {0: request}), {0: pooled})
    assert (tally.requests, tally.tokens, tally.features) == (1, 1, Counter({"embed": 1}))


def test_a_difference_is_vllms_own_if_unsplit_answers_show_it() -> None:
    kinds = {0: {"log-probability"}, 1: set(), 2: {"token"}}
    assert is_own("log-probability", 0, kinds)
    assert not is_own("log-probability", 1, kinds)
    assert not is_own("finish", 0, kinds)
    assert is_own("token", 1, kinds)  # log-probabilities are the same, so it is the sampler's
    assert not is_own("token", 1, {0: {"log-probability"}, 1: set()})


def test_a_prompt_of_one_token_is_vllms_own_with_linear_attention() -> None:
    linear, other = (Abilities(320, frozenset(), 64, has_states=states) for states in (True, False))
    prompts = {Prompt(1, 0): True, Prompt(0, 0, 1, 1): True, Prompt(2, 0): False, Prompt(1, 0, 1, 1): False}
    prompts |= {Prompt(1, 0, image=(56, 56)): False}
    for prompt, expected in prompts.items():
        assert starts_from_others(linear, replace(REQUEST, prompt=prompt)) == expected
        assert not starts_from_others(other, replace(REQUEST, prompt=prompt))


class Unsteady:
    """Answers a request otherwise if it is alone, or if it comes first."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.rounds: list[Round] = []

    def run(self, traffic: Round) -> tuple[dict[int, Answer], Counts]:
        self.rounds.append(traffic)
        alone = len(traffic.requests) == 1
        answers = {n: answer(1 if n == self.number and alone else 0) for n in traffic.requests}
        return answers, Counts()


def answer(token: int) -> Answer:
    return Answer([Completion([token], [{token: -1.0 - token}], "", "length")])


def test_unsplit_runs_differ_in_arrivals_and_have_each_suspect_alone() -> None:
    traffic = Round(0, "0/0", {n: replace(REQUEST, arrives=n) for n in range(4)})
    expected = {n: answer(0) for n in range(4)}
    engine, suspects = Unsteady(2), {1: {"finish"}, 2: {"log-probability"}}
    kinds = find_own_differences(engine, traffic, expected, suspects, 1e-4)  # type: ignore[arg-type]
    assert kinds == {0: set(), 1: set(), 2: {"log-probability"}, 3: set()}
    arrivals = [[request.arrives for request in each.requests.values()] for each in engine.rounds]
    assert arrivals == [[0, 1, 2, 3], [0, judge.SPREAD, 2 * judge.SPREAD, 3 * judge.SPREAD], [3, 2, 1, 0], [0], [0]]
    assert [list(each.requests) for each in engine.rounds[3:]] == [[1], [2]]


def test_of_a_sampler_that_differs_more_orders_are_tried() -> None:
    traffic = Round(0, "0/0", {n: replace(REQUEST, arrives=n) for n in range(4)})
    expected = {n: answer(0) for n in range(4)}
    engine = Unsteady(9)
    kinds = find_own_differences(engine, traffic, expected, {1: {"token"}}, 1e-4)  # type: ignore[arg-type]
    assert not any(kinds.values())
    orders = {tuple(request.arrives for request in each.requests.values()) for each in engine.rounds[4:]}
    assert len(engine.rounds) == 4 + judge.SHUFFLES
    assert len(orders) > judge.SHUFFLES / 2
    wrong = {**expected, 3: Answer([Completion([5], [{0: -1.0, 5: -2.0}], "", "length")])}
    engine.rounds.clear()
    kinds = find_own_differences(engine, traffic, wrong, {1: {"token"}}, 1e-4)  # type: ignore[arg-type]
    assert "contradiction" in kinds[3]
    assert is_own("token", 1, kinds)
    assert len(engine.rounds) == 4


def test_answers_contradict_themselves_if_a_better_token_was_allowed() -> None:
    def ask(**sampling: object) -> Request:
        return replace(REQUEST, sampling={**REQUEST.sampling, **sampling})

    best, second = (Answer([Completion([token], [{0: -1.0, 1: -2.0}])]) for token in (0, 1))
    assert not contradicts_itself(ask(), best, 1e-4)
    assert contradicts_itself(ask(), second, 1e-4)
    assert not contradicts_itself(ask(logit_bias={1: 2.0}), second, 1e-4)
    assert contradicts_itself(ask(logit_bias={1: 2.0}), best, 1e-4)
    assert not contradicts_itself(ask(allowed_token_ids=[1, 7]), second, 1e-4)
    assert contradicts_itself(ask(allowed_token_ids=[1, 7]), best, 1e-4)
    assert contradicts_itself(ask(allowed_token_ids=[7]), second, 1e-4)
    for unsure in (ask(bad_words=["a"]), ask(min_tokens=1), ask(temperature=1.0)):
        assert not contradicts_itself(unsure, second, 1e-4)
    assert not contradicts_itself(replace(ask(), structure={"choice": ["a"]}), second, 1e-4)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--micro-batches", "1"), "--micro-batches: 1 is too small"),
        (("--micro-batches", "2,x"), "--micro-batches: '2,x' is no list of numbers"),
        (("--rounds", "-1"), "--rounds: -1 is too small"),
        (("--requests", "0"), "--requests: 0 is none"),
    ],
)
def test_wrong_numbers_are_refused(words: tuple[str, ...], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    name, value = words
    assert program.main(["soak", "model", f"{name}={value}"]) == 2
    assert error in capsys.readouterr().err


def test_a_round_that_there_is_not_is_refused_before_anything_is_drawn() -> None:
    setup = check.Setup("model", requests=100, rounds=[2, 3])
    with pytest.raises(ConfigError, match="there is no round 3 in 100 requests: 3, from 0"):
        setup.draw(None)  # type: ignore[arg-type]


def test_without_hypothesis_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check, "find_spec", lambda name: None)
    assert program.main(["soak", "model"]) == 2
    assert "needs hypothesis, which is not installed: pip install 'dbo-runtime[lab]'" in capfd.readouterr().err
