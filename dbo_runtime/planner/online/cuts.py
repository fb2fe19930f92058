"""Where to cut a step, and the features of the micro-batches that result."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import numpy as np

from dbo_runtime.batch import BOUNDARY_TOLERANCE, Batch, BatchSlice, list_shares, place_cuts, share_evenly, slice_batch
from dbo_runtime.ir.program import Program
from dbo_runtime.planner.costs.batch_features import BatchFeatures
from dbo_runtime.planner.costs.cost_table import CostTable
from dbo_runtime.planner.costs.op_cost import ComputeCost

Features: TypeAlias = tuple[BatchFeatures, ...]
"""Features of each micro-batch of a step."""


class Cut(NamedTuple):
    """A way to cut a step.

    Attributes:
        features: features of each micro-batch.
        slices: slice of the batch for each micro-batch; empty if data parallel ranks share the cut, as each rank has
            its own slices.
        sizes: number of tokens of every data parallel rank in each micro-batch [micro-batches][ranks]; empty without
            such ranks.
        nano_batches: number of nano-batches; 0 for micro-batches. The features are then those of the step, followed by
            those of each nano-batch, if there are several.
    """

    features: Features = ()
    slices: tuple[BatchSlice, ...] = ()
    sizes: tuple[tuple[int, ...], ...] = ()
    nano_batches: int = 0


class Density(NamedTuple):
    """The cost of all compute ops of a forward pass, in seconds per unit, without fixed costs.

    Attributes:
        token: seconds per token.
        pair, context_pair: seconds per query-key pair; see `BatchFeatures`.
        prefill: seconds per prefill; a cut prefill counts as two.
        context: seconds per token that prefills fetch from the KV cache.
        decode: seconds per token of decodes, in addition to `token`.
        decode_pair: seconds per query-key pair of decodes.
    """

    token: float
    pair: float = 0.0
    context_pair: float = 0.0
    prefill: float = 0.0
    context: float = 0.0
    decode: float = 0.0
    decode_pair: float = 0.0

    def estimate_seconds(self, features: BatchFeatures) -> float:
        """Return the estimated seconds of a batch."""
        return sum(rate * amount for rate, amount in zip(self, features, strict=True))


def compute_density(table: CostTable, program: Program) -> Density:
    """Return the costs of tokens, pairs and prefills, each summed over all ops of *program*."""
    costs = [cost for op in program.ops if isinstance(cost := table.ops[op.name], ComputeCost)]
    return Density(
        token=sum(cost.token_seconds for cost in costs),
        pair=sum(cost.per_pair for cost in costs),
        context_pair=sum(cost.per_context_pair for cost in costs),
        prefill=sum(cost.per_prefill for cost in costs),
        context=sum(cost.per_context for cost in costs),
        decode=sum(cost.per_decode for cost in costs),
        decode_pair=sum(cost.per_decode_pair for cost in costs),
    )


class CostSums:
    """Sums of the costs of a batch's requests. They find where to cut without going through all requests again.

    Args:
        batch: batch to cut.
        density: cost of its tokens and pairs.
    """

    def __init__(self, batch: Batch, density: Density) -> None:
        self._batch = batch
        self._density = density
        self._contexts = batch.contexts
        self._starts = batch.starts
        lengths = np.array(batch.query_lens)
        contexts = np.array(self._contexts)
        decodes = density.decode + density.decode_pair * (contexts + lengths)
        prefills = density.pair * (lengths + 1.0) / 2.0 + density.context_pair * contexts
        prefills += (density.prefill + density.context * contexts) / np.maximum(lengths, 1.0)
        costs = lengths * (density.token + np.where(lengths > batch.decode_len, prefills, decodes))
        self._costs: list[float] = [0.0, *np.cumsum(costs).tolist()]

    def find_offset(self, share: float) -> int:
        """Return, by bisection, the first token offset with at least *share* of the cost before it.

        The two parts of a cut request may together cost less or more than the request. So the share is of the cost of
        both sides of the cut, not of the uncut batch.
        """
        low, high = 0, self._batch.tokens
        while low < high:
            middle = (low + high) // 2
            request = bisect_right(self._starts, middle) - 1
            head, length = middle - self._starts[request], self._batch.query_lens[request]
            before, rest = self._costs[request], self._costs[-1] - self._costs[request + 1]
            if head:
                before += self._estimate_piece(request, 0, head)
            after = self._estimate_piece(request, head, length) + rest
            if before < share * (before + after):
                low = middle + 1
            else:
                high = middle
        return low

    def _estimate_piece(self, request: int, begin: int, end: int) -> float:
        """Return the seconds of the tokens of one request from *begin* up to *end*."""
        density, tokens, context = self._density, end - begin, self._contexts[request] + begin
        if tokens <= self._batch.decode_len:
            return tokens * (density.token + density.decode + density.decode_pair * (context + tokens))
        attended = density.pair * (tokens + 1) / 2 + density.context_pair * context
        return tokens * (density.token + attended) + density.prefill + density.context * context


def balance_targets(sums: CostSums, micro_batches: int) -> tuple[int, ...]:
    """Return the token offsets that cut a batch into micro-batches of equal cost, attention included.

    The last tokens of a long prompt attend to all others. So with equally many tokens, the last micro-batch costs the
    most. If the kernel also computes masked pairs, cutting makes the sum cheaper. Then the best cut of a single prompt
    that costs nothing but attention is at 62 % of its tokens.
    """
    return tuple(sums.find_offset(part / micro_batches) for part in range(1, micro_batches))


def list_cuts(batch: Batch, counts: Sequence[int], density: Density) -> list[Cut]:
    """Return the cuts to predict for each number of micro-batches: one into equal tokens, and one into equal costs."""
    sums = CostSums(batch, density)
    offsets = dict.fromkeys(
        place_cuts(batch, targets)
        for count in counts
        for targets in (share_evenly(batch, count), balance_targets(sums, count))
    )
    return [measure_cut(batch, cut) for cut in offsets if cut or 1 in counts]


def list_shared_cuts(tokens: Sequence[int], counts: Iterable[int]) -> list[Cut]:
    """Return the cuts of a step that data parallel ranks share, from the *tokens* of each [ranks].

    All ranks wait for the slowest one, so the largest number of tokens counts. A rank does not know the contexts and
    lengths of the requests of other ranks, so attention is left out.
    """
    return [
        Cut(tuple(BatchFeatures(max(share)) for share in sizes), sizes=sizes) for sizes in list_shares(tokens, counts)
    ]


def list_samples(batches: Iterable[Batch], counts: Sequence[int], density: Density) -> dict[int, list[Features]]:
    """Return a few cuts to represent all cuts of *batches*: features of each micro-batch, by number of micro-batches.

    They are the planner's own cuts, and others that are as far from these as request boundaries may be.
    """
    samples: dict[int, dict[Features, None]] = defaultdict(dict)
    for batch in batches:
        sums = CostSums(batch, density)
        for count in counts:
            for cut in _list_offsets(batch, sums, count):
                if len(cut) == count - 1 and all(left < right for left, right in pairwise((0, *cut, batch.tokens))):
                    samples[count][measure_cut(batch, cut).features] = None
    return {count: list(of_count) for count, of_count in samples.items()}


def _list_offsets(batch: Batch, sums: CostSums, count: int) -> Iterator[tuple[int, ...]]:
    """Yield the offsets that cut a batch into *count* micro-batches: into equal tokens, equal costs, and near these."""
    even = share_evenly(batch, count)
    yield place_cuts(batch, even)
    yield place_cuts(batch, balance_targets(sums, count))
    shift = int(BOUNDARY_TOLERANCE * batch.tokens / count)
    for by in (-shift, shift):
        yield tuple(target + by for target in even)
    yield tuple(target + (-shift, shift)[number % 2] for number, target in enumerate(even))


def cut_in_shares(batch: Batch, shares: Sequence[float]) -> Cut | None:
    """Return the cut of a batch at these shares of its tokens; None if its requests do not allow all of the cuts."""
    offsets = place_cuts(batch, [round(share * batch.tokens) for share in shares])
    return None if len(offsets) < len(shares) else measure_cut(batch, offsets)


def measure_cut(batch: Batch, offsets: Sequence[int]) -> Cut:
    """Return the cut of a batch at these token offsets."""
    slices = slice_batch(batch, offsets, agreed=True)
    return Cut(measure_slices(batch, slices), slices)


def measure_slices(batch: Batch, slices: Sequence[BatchSlice]) -> tuple[BatchFeatures, ...]:
    """Return the features of each micro-batch. For the second part of a cut request, the first is in the KV cache."""
    return tuple([_measure_slice(batch, piece) for piece in slices])


def measure_batch(batch: Batch) -> BatchFeatures:
    """Return the features of all requests, as `measure_features` does."""
    return _measure_slice(batch, BatchSlice(0, len(batch.query_lens), 0, batch.tokens))


def _measure_slice(batch: Batch, piece: BatchSlice) -> BatchFeatures:
    """Return the features of a micro-batch. It does not loop over decodes of one token: it sums their contexts."""
    contexts, decode_len = batch.contexts, batch.decode_len
    first, last = piece.first_request, piece.last_request
    long_requests = batch.long_requests if decode_len else range(last)
    begin, end = bisect_left(long_requests, first), bisect_left(long_requests, last)
    decodes = last - first - (end - begin)
    decode_pairs = decodes + sum(contexts[first:last])
    pairs = context_pairs = prefills = prefill_context = 0
    for request in long_requests[begin:end]:
        start, context = batch.starts[request], contexts[request]
        decode_pairs -= context
        head = max(piece.first_token - start, 0)  # tokens of the request in earlier micro-batches
        length, context = min(piece.last_token, batch.starts[request + 1]) - start - head, context + head
        if length > decode_len:
            prefills += 1
            prefill_context += context
            pairs += length * (length + 1) // 2
            context_pairs += length * context
        else:
            decodes += length
            decode_pairs += length * (context + length)
    return BatchFeatures(
        piece.size,
        float(pairs),
        float(context_pairs),
        float(prefills),
        float(prefill_context),
        float(decodes),
        float(decode_pairs),
    )
