"""Requests of random traffic, and what a served model can be asked: plain data that travels between processes."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

GREEDY = 0.0  # temperature


@dataclass(frozen=True)
class Abilities:
    """What a served model can be asked.

    Attributes:
        vocabulary: token ids are below it.
        special: token ids that no prompt has: they end texts or stand for images.
        longest: tokens of a prompt and its answer together, at most.
        words: short texts that answers may have, for stop strings and bad words; none without a tokenizer.
        image_prompt: the text of a prompt with one image; none if the model takes no images.
        loras: how many LoRA adapters are served.
        lacking: features that this vLLM does not have here, which traffic leaves out.
        has_states: whether layers keep a state of each request. vLLM takes a prompt of one token for a decode there,
            which goes on from the state that another request has left in its place.
        tasks: of vLLM's poolers, such as `embed`, of a model that pools and so answers no prompt; none of others.
    """

    vocabulary: int
    special: frozenset[int]
    longest: int
    words: tuple[str, ...] = ()
    image_prompt: str | None = None
    loras: int = 0
    lacking: frozenset[str] = frozenset()
    tasks: tuple[str, ...] = ()
    has_states: bool = False


@dataclass(frozen=True)
class Prompt:
    """A prompt of random tokens, of which the first may be those of other prompts; or one with an image.

    Attributes:
        prefix: which of the round's prefixes it begins with; None for none.
        prefix_tokens: how many of that prefix's tokens.
        tokens: of its own.
        seed: of its own tokens, and of its image.
        image: width and height [pixels], and the prompt is the model's own around it; None for a prompt of tokens.
    """

    tokens: int
    seed: int
    prefix: int | None = None
    prefix_tokens: int = 0
    image: tuple[int, int] | None = None

    @property
    def is_one_token(self) -> bool:
        """Whether that is all."""
        return self.image is None and self.tokens + self.prefix_tokens == 1

    def draw_tokens(self, abilities: Abilities, round_seed: str) -> list[int]:
        """Return the prompt's token ids."""
        shared = [] if self.prefix is None else _draw(abilities, f"{round_seed}/{self.prefix}", self.prefix_tokens)
        return [*shared, *_draw(abilities, f"{round_seed}/own/{self.seed}", self.tokens)]


@dataclass(frozen=True)
class Request:
    """One request.

    Attributes:
        prompt: what it asks.
        sampling: arguments of vLLM's `SamplingParams`; log-probabilities are always among them. Empty if it pools.
        structure: arguments of vLLM's `StructuredOutputsParams`; none for a free answer.
        arrives: the turn in which it is added.
        leaves: how many turns after that it is aborted; None for never.
        lora: number of its LoRA adapter, from 0; None for none.
        pooling: arguments of vLLM's `PoolingParams`, of which `task` is one; none for a request that is answered.
    """

    prompt: Prompt
    sampling: dict[str, Any] = field(hash=False)
    structure: dict[str, Any] | None = field(default=None, hash=False)
    arrives: int = 0
    leaves: int | None = None
    lora: int | None = None
    pooling: dict[str, Any] | None = field(default=None, hash=False)

    @property
    def features(self) -> list[str]:
        """What it has besides a prompt and a greedy answer, for counts."""
        found = [name for name in self.sampling if name not in ("temperature", "max_tokens", "logprobs", "top_k")]
        found += ["structured_outputs"] if self.structure is not None else []
        found += ["image"] if self.prompt.image is not None else []
        found += ["lora"] if self.lora is not None else []
        found += ["shared prefix"] if self.prompt.prefix is not None else []
        found += [self.pooling["task"]] if self.pooling is not None else []
        return [name for name in found if not (name == "n" and self.sampling["n"] == 1)]

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken each time."""
        return bool(self.sampling.get("temperature") == GREEDY or self.sampling.get("top_k") == 1)

    def score(self, token: int, log_prob: float, before: list[int]) -> float:
        """Return what a greedy request compares tokens by: the log-probability, with biases and penalties on it.

        Args:
            token: that may be next.
            log_prob: the model's, for that token.
            before: tokens of the answer so far.
        """
        count = before.count(token)
        score = log_prob + self.sampling.get("logit_bias", {}).get(token, 0.0)
        score -= self.sampling.get("frequency_penalty", 0.0) * count
        return float(score - self.sampling.get("presence_penalty", 0.0) * (count > 0))


@dataclass(frozen=True)
class Round:
    """Requests that are in flight together; nothing is cached when it begins.

    Attributes:
        number: from 0.
        seed: that its prompts are made by.
        requests: by number from 0.
        pause: the turn before which all requests that run come to their ends, and costs of ops are measured where steps
            are split, if that is asked for; None for never. Prefixes stay cached.
    """

    number: int
    seed: str
    requests: dict[int, Request] = field(hash=False)
    pause: int | None = None

    @property
    def turns(self) -> int:
        """Turns until all requests have arrived, and the pause is over."""
        arrivals = [request.arrives for request in self.requests.values()]
        return 1 + max(arrivals + ([] if self.pause is None else [self.pause]), default=0)


def _draw(abilities: Abilities, seed: str, count: int) -> list[int]:
    rng = random.Random(seed)
    tokens: list[int] = []
    while len(tokens) < count:
        token = rng.randrange(abilities.vocabulary)
        if token not in abilities.special:
            tokens.append(token)
    return tokens
