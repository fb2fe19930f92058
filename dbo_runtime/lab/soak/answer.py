"""What an engine answered: plain data that travels between processes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

LogProbs = dict[int, float]
"""Log-probabilities by token id: the most likely tokens', the chosen one's in any case."""


@dataclass(frozen=True)
class Completion:
    """One of a request's answers.

    Attributes:
        tokens: ids.
        log_probs: at each of the tokens.
        text: of the tokens; empty without a tokenizer.
        finish: why it ended, such as `stop` or `length`; None if it was aborted before.
        stop: the token id or text that stopped it.
    """

    tokens: list[int]
    log_probs: list[LogProbs]
    text: str = ""
    finish: str | None = None
    stop: int | str | None = None


@dataclass(frozen=True)
class Answer:
    """What came back for a request.

    Attributes:
        completions: as many as it asked for; fewer if it was aborted.
        prompt_log_probs: at each of the prompt's tokens, None at the first; None if they were not asked for.
        was_aborted: whether it was still running when it was aborted.
        refusal: why vLLM did not take the request; None if it did.
        pooled: the pooler's result [1 or tokens, numbers]; None if pooling was not asked for.
    """

    completions: list[Completion] = field(default_factory=list)
    prompt_log_probs: list[LogProbs | None] | None = None
    was_aborted: bool = False
    refusal: str | None = None
    pooled: list[list[float]] | None = None


@dataclass
class Counts:
    """What happened in an engine while it answered.

    Attributes:
        split: steps.
        micro_batches: of all split steps.
        declined: steps by the reason not to split them.
        preempted: requests that lost their KV cache to others, and began again.
        cached: tokens of prompts that were found in the prefix cache.
        calibrated: how often costs of ops were measured between requests.
        alarms: the texts of alarms that the comparison of first steps raised, with their counts.
    """

    split: int = 0
    micro_batches: int = 0
    declined: Counter[str] = field(default_factory=Counter)
    preempted: int = 0
    cached: int = 0
    calibrated: int = 0
    alarms: Counter[str] = field(default_factory=Counter)

    def add(self, other: Counts) -> None:
        """Add what happened elsewhere, or at another time."""
        self.split += other.split
        self.micro_batches += other.micro_batches
        self.declined += other.declined
        self.preempted += other.preempted
        self.cached += other.cached
        self.calibrated += other.calibrated
        self.alarms += other.alarms

    def since(self, before: Counts) -> Counts:
        """Return what happened since *before*."""
        return Counts(
            self.split - before.split,
            self.micro_batches - before.micro_batches,
            self.declined - before.declined,
            self.preempted - before.preempted,
            self.cached - before.cached,
            self.calibrated - before.calibrated,
            self.alarms - before.alarms,
        )
