"""Requests of random traffic, and the abilities of a served model: plain data that can be sent between processes."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

GREEDY = 0.0  # temperature


@dataclass(frozen=True)
class Abilities:
    """The kinds of requests that a served model can answer.

    Attributes:
        vocabulary: size of the vocabulary; token ids are below it.
        special: token ids that no prompt has, because they end texts or stand for images.
        longest: most tokens of a prompt and its answer together.
        words: short texts that answers may contain, for stop strings and bad words; empty without a tokenizer.
        image_prompt: text of a prompt with one image; none if the model takes no images.
        loras: number of served LoRA adapters.
        lacking: features that this vLLM lacks here, so that traffic leaves them out.
        has_states: whether layers keep a state per request. vLLM then treats a prompt of one token as a decode, which
            continues from the state that another request has left in its place.
        tasks: tasks of vLLM's poolers, such as `embed`, for a model that pools and answers no prompts; otherwise empty.
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
    """A prompt of random tokens, which may begin like other prompts; or a prompt with an image.

    Attributes:
        prefix: number of the round's prefix that it begins with; None for none.
        prefix_tokens: number of tokens taken from that prefix.
        tokens: number of its own tokens.
        seed: seed of its own tokens and its image.
        image: width and height [pixels] of the image inside the model's own prompt; None for a prompt of tokens.
    """

    tokens: int
    seed: int
    prefix: int | None = None
    prefix_tokens: int = 0
    image: tuple[int, int] | None = None

    @property
    def is_one_token(self) -> bool:
        """Whether the prompt is a single token."""
        return self.image is None and self.tokens + self.prefix_tokens == 1

    def draw_tokens(self, abilities: Abilities, round_seed: str) -> list[int]:
        """Return the prompt's token ids."""
        shared = [] if self.prefix is None else _draw(abilities, f"{round_seed}/{self.prefix}", self.prefix_tokens)
        return [*shared, *_draw(abilities, f"{round_seed}/own/{self.seed}", self.tokens)]


@dataclass(frozen=True)
class Request:
    """One request.

    Attributes:
        prompt: the prompt.
        sampling: arguments for vLLM's `SamplingParams`, always with log-probabilities. Empty if it pools.
        structure: arguments for vLLM's `StructuredOutputsParams`; empty for a free answer.
        arrives: turn in which it is added.
        leaves: number of turns after which it is aborted; None for never.
        lora: number of its LoRA adapter, from 0; None for none.
        pooling: arguments for vLLM's `PoolingParams`, including `task`; empty for a request that is answered.
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
        """The request's features besides a prompt and a greedy answer, for counts."""
        found = [name for name in self.sampling if name not in ("temperature", "max_tokens", "logprobs", "top_k")]
        found += ["structured_outputs"] if self.structure is not None else []
        found += ["image"] if self.prompt.image is not None else []
        found += ["lora"] if self.lora is not None else []
        found += ["shared prefix"] if self.prompt.prefix is not None else []
        found += [self.pooling["task"]] if self.pooling is not None else []
        return [name for name in found if not (name == "n" and self.sampling["n"] == 1)]

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return bool(self.sampling.get("temperature") == GREEDY or self.sampling.get("top_k") == 1)

    def score(self, token: int, log_prob: float, before: list[int]) -> float:
        """Return the value by which a greedy request compares tokens: the log-probability with biases and penalties.

        Args:
            token: token that may be next.
            log_prob: the model's log-probability of that token.
            before: tokens of the answer so far.
        """
        count = before.count(token)
        score = log_prob + self.sampling.get("logit_bias", {}).get(token, 0.0)
        score -= self.sampling.get("frequency_penalty", 0.0) * count
        return float(score - self.sampling.get("presence_penalty", 0.0) * (count > 0))


@dataclass(frozen=True)
class Round:
    """Requests that are in flight together. Nothing is cached when the round begins.

    Attributes:
        number: number of the round, from 0.
        seed: seed of the prompts.
        requests: requests by number from 0.
        pause: turn before which all running requests are completed; if requested, op costs are then measured in the
            split engine. None for never. Prefixes stay cached.
    """

    number: int
    seed: str
    requests: dict[int, Request] = field(hash=False)
    pause: int | None = None

    @property
    def turns(self) -> int:
        """Number of turns until all requests have arrived, and the pause is over."""
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
