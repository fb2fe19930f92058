"""The answers of an engine, as plain data that can be sent between processes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

LogProbs = dict[int, float]
"""Log-probabilities by token id: those of the most likely tokens, and always that of the chosen one."""


@dataclass(frozen=True)
class Completion:
    """One of a request's answers.

    Attributes:
        tokens: token ids.
        log_probs: log-probabilities at each of the tokens.
        text: text of the tokens; empty without a tokenizer.
        finish: reason why it ended, such as `stop` or `length`; None if it was aborted before.
        stop: the token id or text that stopped it.
    """

    tokens: list[int]
    log_probs: list[LogProbs]
    text: str = ""
    finish: str | None = None
    stop: int | str | None = None


@dataclass(frozen=True)
class Answer:
    """The result of a request.

    Attributes:
        completions: the answers, as many as requested; fewer if it was aborted.
        prompt_log_probs: log-probabilities at each prompt token, None at the first; None if not requested.
        was_aborted: whether the request was still running when it was aborted.
        refusal: reason why vLLM did not accept the request; None if it did.
        pooled: the pooler's result [1 or tokens, numbers]; None if pooling was not requested.
    """

    completions: list[Completion] = field(default_factory=list)
    prompt_log_probs: list[LogProbs | None] | None = None
    was_aborted: bool = False
    refusal: str | None = None
    pooled: list[list[float]] | None = None


@dataclass
class Counts:
    """The events in an engine while it answered.

    Attributes:
        split: number of steps split into micro-batches.
        micro_batches: number of micro-batches of all these steps.
        nano: number of steps whose ops ran in nano-batches.
        declined: number of unsplit steps by reason.
        preempted: number of requests that lost their KV cache to others, and started again.
        cached: number of prompt tokens found in the prefix cache.
        calibrated: number of times that op costs were measured between requests.
        alarms: number of alarms raised by the comparison of first steps, by text.
        failures: reasons why no step is split any more, by text: the first split step has failed.
    """

    split: int = 0
    micro_batches: int = 0
    nano: int = 0
    declined: Counter[str] = field(default_factory=Counter)
    preempted: int = 0
    cached: int = 0
    calibrated: int = 0
    alarms: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)

    def add(self, other: Counts) -> None:
        """Add the counts of another process or time."""
        self.split += other.split
        self.micro_batches += other.micro_batches
        self.nano += other.nano
        self.declined += other.declined
        self.preempted += other.preempted
        self.cached += other.cached
        self.calibrated += other.calibrated
        self.alarms += other.alarms
        self.failures += other.failures

    def since(self, before: Counts) -> Counts:
        """Return the difference to the counts *before*."""
        return Counts(
            self.split - before.split,
            self.micro_batches - before.micro_batches,
            self.nano - before.nano,
            self.declined - before.declined,
            self.preempted - before.preempted,
            self.cached - before.cached,
            self.calibrated - before.calibrated,
            self.alarms - before.alarms,
            self.failures - before.failures,
        )
