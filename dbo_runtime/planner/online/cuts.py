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
        slices: one a micro-batch; none if the cut is shared by data parallel ranks, each with slices of its own.
        sizes: tokens of every data parallel rank in each micro-batch [micro-batches][ranks]; none without such ranks.
    """

    features: Features = ()
    slices: tuple[BatchSlice, ...] = ()
    sizes: tuple[tuple[int, ...], ...] = ()


class Density(NamedTuple):
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
        return sum(rate * amount for rate, amount in zip(self, features, strict=True))


def compute_density(table: CostTable, program: Program) -> Density:
    """Return the sums of what tokens and pairs cost over all ops of *program*."""
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
    """Sums of what a batch's requests cost: finds where to cut without going through all requests again.

    Args:
        batch: to cut.
        density: of its cost.
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
        """Return the first offset before which lies at least *share* of the cost, by bisection.

        Pieces of a cut request cost less or more than the request, so the cost to compare with is that of both sides.
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
    """Return the token offsets that cut a batch into parts of equal cost, attention included.

    The last tokens of a long prompt attend to all the others, so of an even cut by tokens the last micro-batch costs
    the most. Where the kernel computes masked pairs, too, cutting makes the sum cheaper, and the best cut of a single
    prompt that costs nothing but attention is at 62 % of it.
    """
    return tuple(sums.find_offset(part / micro_batches) for part in range(1, micro_batches))


def list_cuts(batch: Batch, counts: Sequence[int], density: Density) -> list[Cut]:
    """Return the cuts to predict for each number of micro-batches: even by tokens, and even by cost."""
    sums = CostSums(batch, density)
    offsets = dict.fromkeys(
        place_cuts(batch, targets)
        for count in counts
        for targets in (share_evenly(batch, count), balance_targets(sums, count))
    )
    return [measure_cut(batch, cut) for cut in offsets if cut or 1 in counts]


def list_shared_cuts(tokens: Sequence[int], counts: Iterable[int]) -> list[Cut]:
    """Return the cuts of a step that data parallel ranks share, from the *tokens* of each [ranks].

    The other ranks wait for the slowest one, so the largest number of tokens counts. Contexts and lengths of requests
    of other ranks are not known, so attention to them is left out.
    """
    return [
        Cut(tuple(BatchFeatures(max(share)) for share in sizes), sizes=sizes) for sizes in list_shares(tokens, counts)
    ]


def list_samples(batches: Iterable[Batch], counts: Sequence[int], density: Density) -> dict[int, list[Features]]:
    """Return cuts that stand for all cuts of *batches*: features of each micro-batch, by the number of micro-batches.

    They are the planner's own cuts, and others as far away as request boundaries may lie.
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
    """Yield where to cut a batch into *count* micro-batches: evenly, by cost, and beside that."""
    even = share_evenly(batch, count)
    yield place_cuts(batch, even)
    yield place_cuts(batch, balance_targets(sums, count))
    shift = int(BOUNDARY_TOLERANCE * batch.tokens / count)
    for by in (-shift, shift):
        yield tuple(target + by for target in even)
    yield tuple(target + (-shift, shift)[number % 2] for number, target in enumerate(even))


def cut_in_shares(batch: Batch, shares: Sequence[float]) -> Cut | None:
    """Return the cut of a batch at these shares of its tokens; None if its requests do not allow so many cuts."""
    offsets = place_cuts(batch, [round(share * batch.tokens) for share in shares])
    return None if len(offsets) < len(shares) else measure_cut(batch, offsets)


def measure_cut(batch: Batch, offsets: Sequence[int]) -> Cut:
    """Return the cut of a batch at these token offsets."""
    slices = slice_batch(batch, offsets, agreed=True)
    return Cut(measure_slices(batch, slices), slices)


def measure_slices(batch: Batch, slices: Sequence[BatchSlice]) -> tuple[BatchFeatures, ...]:
    """Return the features of each micro-batch; the second part of a cut request has the first in the KV cache."""
    return tuple([_measure_slice(batch, piece) for piece in slices])


def measure_batch(batch: Batch) -> BatchFeatures:
    """Return the features of all requests, as `measure_features` does."""
    return _measure_slice(batch, BatchSlice(0, len(batch.query_lens), 0, batch.tokens))


def _measure_slice(batch: Batch, piece: BatchSlice) -> BatchFeatures:
    """Return the features of a micro-batch. Decodes of one token are only counted, and their contexts added up."""
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
        head = max(piece.first_token - start, 0)  # is in another micro-batch
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
