"""Where to cut so that micro-batches cost the same, and the features of each of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from itertools import accumulate

from dbo_runtime.batch import Batch, BatchSlice
from dbo_runtime.planner.costs.batch_features import BatchFeatures, measure_features
from dbo_runtime.planner.costs.cost_table import CostTable
from dbo_runtime.planner.costs.op_cost import ComputeCost
from dbo_runtime.program import Program


@dataclass(frozen=True, slots=True)
class Density:
    """The cost of all compute ops of a forward pass, without fixed parts, in seconds.

    Attributes:
        token: of each token.
        pair, context_pair: of each query-key pair; see `BatchFeatures`.
        prefill: of each prefill; cutting one makes two of it.
        context: of each token that prefills fetch from the KV cache.
        decode: of each token of decodes, in addition to `token`.
        decode_pair: of each query-key pair of decodes.
    """

    token: float
    pair: float = 0.0
    context_pair: float = 0.0
    prefill: float = 0.0
    context: float = 0.0
    decode: float = 0.0
    decode_pair: float = 0.0

    def estimate_seconds(self, features: BatchFeatures) -> float:
        """Return the seconds of a batch."""
        seconds: float = sum(rate * amount for rate, amount in zip(astuple(self), features, strict=True))
        return seconds


def compute_density(table: CostTable, program: Program) -> Density:
    """Return the sums of what tokens and pairs cost over all ops of *program*."""
    costs = [cost for op in program.ops if isinstance(cost := table.ops[op.name], ComputeCost)]
    return Density(
        token=sum(cost.per_token * cost.imbalance for cost in costs),
        pair=sum(cost.per_pair for cost in costs),
        context_pair=sum(cost.per_context_pair for cost in costs),
        prefill=sum(cost.per_prefill for cost in costs),
        context=sum(cost.per_context for cost in costs),
        decode=sum(cost.per_decode for cost in costs),
        decode_pair=sum(cost.per_decode_pair for cost in costs),
    )


def balance_targets(batch: Batch, micro_batches: int, density: Density) -> tuple[int, ...]:
    """Return the token offsets that cut a batch into parts of equal cost, attention included.

    The last tokens of a long prompt attend to all the others, so of an even cut by tokens the last micro-batch costs
    the most. Where the kernel computes masked pairs, too, cutting makes the sum cheaper, and the best cut of a single
    prompt that costs nothing but attention is at 62 % of it.
    """
    return tuple(_find_offset(batch, part / micro_batches, density) for part in range(1, micro_batches))


def measure_slices(batch: Batch, slices: Sequence[BatchSlice]) -> tuple[BatchFeatures, ...]:
    """Return the features of each micro-batch; the second part of a cut request has the first in the KV cache."""
    return tuple(_measure_range(batch, piece.first_token, piece.last_token) for piece in slices)


def _find_offset(batch: Batch, share: float, density: Density) -> int:
    """Return the first offset before which lies at least *share* of the cost, by bisection."""
    low, high = 0, batch.tokens
    while low < high:
        middle = (low + high) // 2
        before = density.estimate_seconds(_measure_range(batch, 0, middle))
        after = density.estimate_seconds(_measure_range(batch, middle, batch.tokens))
        if before < share * (before + after):
            low = middle + 1
        else:
            high = middle
    return low


def _measure_range(batch: Batch, first: int, last: int) -> BatchFeatures:
    starts = accumulate(batch.query_lens, initial=0)
    queries, contexts = [], []
    for start, length, context in zip(starts, batch.query_lens, batch.contexts, strict=False):
        left, right = max(first, start), min(last, start + length)
        if left < right:
            queries.append(right - left)
            contexts.append(context + left - start)
    return measure_features(queries, contexts, batch.decode_len)
