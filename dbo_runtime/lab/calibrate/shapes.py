"""Choose the dummy batches to measure a model with, and how often to run each.

Small batches come first. Each is repeated as often as leaves time for larger ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dbo_runtime.planner.costs.batch_features import BatchFeatures, measure_features
from dbo_runtime.vllm_plugin.api.dummy_batches import Limits

GROWTH_FACTOR = 4  # ratio between a size and the next
MIN_PREFILL_TOKENS = 8
MAX_PREFILLS = 8  # prefills in one batch
SHORT_CONTEXT_TOKENS = 16
MAX_REPEATS = 3  # per shape, after a warm-up round; layers are repeats, too
LONG_ROUND_SECONDS = 1.0  # a longer round runs at most twice: once for each cut


@dataclass(frozen=True, slots=True)
class Shape:
    """A batch of equal requests: *tokens* new tokens each, after *context* tokens that are already in the KV cache."""

    requests: int
    tokens: int
    context: int = 0

    def __str__(self) -> str:
        after = f" after {self.context}" if self.context else ""
        return f"{self.requests} x {self.tokens} tokens{after}"

    @property
    def total(self) -> int:
        """New tokens of all requests."""
        return self.requests * self.tokens

    @property
    def is_single_prefill(self) -> bool:
        """Whether the batch is one prompt with nothing in the KV cache."""
        return self.requests == 1 and not self.context

    @property
    def cuts(self) -> tuple[int, ...]:
        """The tokens to cut at to get two micro-batches: in the middle, and so that one gets nearly all tokens.

        Cuts are between requests, or inside a single request if both parts stay prefills.
        """
        unit, units = (self.tokens, self.requests) if self.requests > 1 else (1, self.tokens)
        least = 1 if self.requests > 1 else min(2, units // 2)
        return tuple(dict.fromkeys((units // 2 * unit, (units - least) * unit)))

    def measure_features(self, first: int = 0, last: int | None = None) -> BatchFeatures:
        """Return the features of the tokens from *first* to *last*. A cut request's head is context for its tail."""
        last = self.total if last is None else last
        query_lens, context_lens = [], []
        for start in range(0, self.total, self.tokens):
            begin, end = max(first, start), min(last, start + self.tokens)
            if begin < end:
                query_lens.append(end - begin)
                context_lens.append(self.context + begin - start)
        return measure_features(query_lens, context_lens)

    def measure_parts(self, cut: int) -> tuple[BatchFeatures, BatchFeatures]:
        """Return the features of a cut's two micro-batches."""
        return self.measure_features(0, cut), self.measure_features(cut)


def choose_shapes(limits: Limits) -> list[Shape]:
    """Return the batches to measure: single prefills of all sizes first, so that a short calibration covers all sizes.

    These are: one prefill, with as many query-key pairs as its tokens can have; several prefills, with few pairs; a
    prefill after a long context; and decodes after a short and after a long context. Together they separate the fixed
    cost from the costs per token, per pair and of the context. In both groups, small batches come first.
    """
    longest = min(limits.tokens, limits.length, limits.blocks * limits.block_size)
    lengths = list(_grow(MIN_PREFILL_TOKENS, longest))
    counts = list(_grow(2, min(limits.requests, limits.tokens)))
    shapes = {Shape(requests, length) for length in lengths for requests in (1, min(MAX_PREFILLS, limits.requests))}
    shapes |= {Shape(1, length, longest // 2) for length in lengths[1::2]}
    for requests in counts:
        room = limits.blocks // requests * limits.block_size
        long_context = min(longest, limits.length, room) - 1
        shapes |= {Shape(requests, 1, min(SHORT_CONTEXT_TOKENS, long_context)), Shape(requests, 1, long_context)}
    fitting = (shape for shape in shapes if _fits(shape, limits))
    return sorted(fitting, key=lambda s: (not s.is_single_prefill, s.total, s.context, s.requests))


def _grow(first: int, last: int) -> Iterator[int]:
    """Yield growing sizes from *first* on, then *last*."""
    while first * 1.5 < last:
        yield first
        first *= GROWTH_FACTOR
    if last > 1:
        yield last


def _fits(shape: Shape, limits: Limits) -> bool:
    length = shape.tokens + shape.context
    blocks = shape.requests * -(-length // limits.block_size)
    return (
        1 < shape.total <= limits.tokens
        and shape.context >= 0
        and shape.requests <= limits.requests
        and length <= limits.length
        and blocks <= limits.blocks
    )


def choose_repeats(left: float, round_seconds: float) -> int:
    """Return how often to repeat a shape whose round takes *round_seconds*, if *left* seconds remain for all shapes.

    At most half of the time goes to this shape, so that time remains for larger shapes.
    """
    most = 2 if round_seconds > LONG_ROUND_SECONDS else MAX_REPEATS
    return max(0, min(most, int(left / 2 / round_seconds)))


def expect_round(rounds: Sequence[tuple[Shape, float]], shape: Shape) -> float:
    """Return a lower bound for the seconds of a round of *shape*, from the measured *rounds* of smaller shapes.

    The time beyond that of the first, smallest shape grows at least in proportion to the tokens, for equally many
    requests.
    """
    (_, fixed), *others = rounds
    alike = [(seconds - fixed) / other.total for other, seconds in others if other.requests == shape.requests]
    return fixed + max(0.0, *alike[-1:]) * shape.total if alike else fixed
