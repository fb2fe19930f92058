"""The result of random traffic, with split steps compared to unsplit ones."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from dbo_runtime.lab.soak.answer import Answer, Counts
from dbo_runtime.lab.soak.comparison import ALARM, FAILURE, Difference
from dbo_runtime.lab.soak.request import Request, Round

SHOWN = 5  # bugs to describe in full


@dataclass(frozen=True)
class Bug:
    """A request that was answered differently with split steps.

    Attributes:
        micro_batches: number of micro-batches in the split run.
        round: number of the round; `check_equivalence(..., rounds=[round])` runs it alone.
        number: number of the request in its round.
        request: the request; None if the whole round failed.
        difference: the first difference.
    """

    micro_batches: int
    round: int
    number: int | None
    request: Request | None
    difference: Difference

    def __str__(self) -> str:
        """Format as a few lines."""
        which = f"round {self.round}" + ("" if self.number is None else f", request {self.number}")
        lines = [f"{which}, {self.micro_batches} micro-batches: {self.difference}"]
        if self.request is not None:
            lines.append(f"  {self.request}")
        return "\n".join(lines)


@dataclass
class Tally:
    """The result for one number of micro-batches.

    Attributes:
        micro_batches: number of micro-batches that steps were split into.
        requests: number of compared requests.
        tokens: number of tokens in answers from split steps; for pooled results, rows.
        counts: events in the engine that splits.
        features: number of requests by feature, besides a prompt.
        aborted: number of requests that were running when they were aborted.
        refused: number of requests that vLLM did not accept, split and unsplit alike.
        equal: number of requests without any difference.
        ties: number of requests with two tokens that were equally likely within rounding, one taken in each run.
        own: number of requests that unsplit runs of vLLM answer differently among themselves, depending on arrival.
        bugs: all other requests with differences.
        largest: largest difference of log-probabilities or pooled numbers, among equal requests and ties.
        seconds: duration of the split run.
    """

    micro_batches: int
    requests: int = 0
    tokens: int = 0
    counts: Counts = field(default_factory=Counts)
    features: Counter[str] = field(default_factory=Counter)
    aborted: int = 0
    refused: int = 0
    equal: int = 0
    ties: int = 0
    own: int = 0
    bugs: list[Bug] = field(default_factory=list)
    largest: float = 0.0
    seconds: float = 0.0

    def note_answers(self, traffic: Round, answers: dict[int, Answer]) -> None:
        """Count the requests and answers."""
        for number, answer in answers.items():
            self.requests += 1
            self.features.update(traffic.requests[number].features)
            self.tokens += sum(len(completion.tokens) for completion in answer.completions) + len(answer.pooled or ())
            self.aborted += answer.was_aborted
            self.refused += answer.refusal is not None

    def __str__(self) -> str:
        """Format as lines."""
        counts = self.counts
        steps = f"{counts.split} split in {counts.micro_batches} parts, {counts.nano} in nano-batches"
        steps += f", {counts.declined.total()} unsplit"
        others = f"{self.aborted} aborts, {self.refused} refused, {counts.cached} prompt tokens were cached"
        lines = [
            f"{self.micro_batches} micro-batches: {self.requests} requests, {self.tokens} tokens, {self.seconds:.0f} s",
            f"  steps: {steps}; {counts.preempted} preemptions, {others}",
            f"  answers: {self.equal} equal, {self.ties} ties, {self.own} vLLM's own, {len(self.bugs)} bugs; "
            f"log-probabilities within {self.largest:.1e}",
        ]
        lines += [f"  costs measured between requests: {counts.calibrated}"] if counts.calibrated else []
        lines += [f"  not split: {_list(counts.declined)}"] if counts.declined else []
        lines += [f"  among the requests: {_list(self.features)}"] if self.features else []
        return "\n".join(lines)


@dataclass
class EquivalenceReport:
    """The result of `check_equivalence`; true if split steps gave the same results as unsplit ones.

    Attributes:
        model: directory or name of the model.
        reference: the engine that split steps were compared with.
        seed: seed of the traffic.
        command: the command that repeats a round; `ROUND` stands for its number.
        tallies: one result per number of micro-batches.
        seconds: total duration, including the starts of engines.
    """

    model: str
    reference: str
    seed: int
    command: str
    tallies: list[Tally] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def bugs(self) -> list[Bug]:
        """All bugs."""
        return [bug for tally in self.tallies for bug in tally.bugs]

    @property
    def failure(self) -> str | None:
        """The reason why this is no proof of equivalence; None if it is one."""
        if any(bug.difference.kind == FAILURE for bug in self.bugs):
            return "a split step failed"
        if any(bug.difference.kind == ALARM for bug in self.bugs):
            return "the comparison of first steps has ended splitting"
        if self.bugs:
            return f"{len(self.bugs)} requests were answered otherwise where steps were split"
        unsplit = [tally.micro_batches for tally in self.tallies if not tally.counts.split + tally.counts.nano]
        if unsplit:
            return f"no step was split into {unsplit[0]} micro-batches, so nothing was compared; `dbo doctor` says more"
        return None

    def __bool__(self) -> bool:
        """Return whether split steps gave the same results as unsplit ones."""
        return self.failure is None

    def __str__(self) -> str:
        """Format as lines."""
        lines = [f"{self.model}, seed {self.seed}, against {self.reference}; {self.seconds:.0f} s with starts"]
        lines += map(str, self.tallies)
        for bug in self.bugs[:SHOWN]:
            lines += [f"bug: {bug}", f"  {self.command.replace('ROUND', str(bug.round))}"]
        if len(self.bugs) > SHOWN:
            numbers = Counter(bug.round for bug in self.bugs)
            lines.append(f"{len(self.bugs) - SHOWN} more bugs; bugs by round: {dict(numbers)}")
        lines.append(f"FAILED: {self.failure}" if self.failure else "equivalent")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain JSON data, for programs."""
        return {
            "model": self.model,
            "reference": self.reference,
            "seed": self.seed,
            "seconds": self.seconds,
            "failure": self.failure,
            "micro_batches": [_describe(tally) for tally in self.tallies],
        }


def _list(counts: Counter[str]) -> str:
    return ", ".join(f"{name} ({count})" for name, count in counts.most_common())


def _describe(tally: Tally) -> dict[str, Any]:
    counts = tally.counts
    return {
        "micro_batches": tally.micro_batches,
        "requests": tally.requests,
        "tokens": tally.tokens,
        "split": counts.split,
        "parts": counts.micro_batches,
        "nano": counts.nano,
        "declined": dict(counts.declined),
        "preempted": counts.preempted,
        "cached": counts.cached,
        "calibrated": counts.calibrated,
        "features": dict(tally.features),
        "aborted": tally.aborted,
        "refused": tally.refused,
        "equal": tally.equal,
        "ties": tally.ties,
        "own": tally.own,
        "largest": tally.largest,
        "seconds": tally.seconds,
        "bugs": [
            {
                "round": bug.round,
                "request": bug.number,
                "asked": repr(bug.request),
                "difference": bug.difference._asdict(),
            }
            for bug in tally.bugs
        ],
    }
