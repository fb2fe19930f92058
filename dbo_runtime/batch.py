"""Decide whether to split a scheduled batch and where to cut it: pure functions of integers.

All ranks hold the same integers, so they all decide alike.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

from dbo_runtime.decline import Decline
from dbo_runtime.errors import SplitError

# A request boundary within this share of a micro-batch from the even cut is preferred to a cut inside a request:
# results are then bit-identical, and attention over the head runs only once. vllm-ascend #941 tolerates the same
# imbalance.
BOUNDARY_TOLERANCE = 0.1

# A smallest micro-batch below this share of an even one would hide next to nothing, but would pay the fixed cost of
# every collective once more.
MIN_SHARE = 0.1

FEW_TOKENS = "fewer tokens than DBO_MIN_TOKENS"  # reason of a decline
FEW_PREFILL_TOKENS = "fewer prefill tokens than DBO_MIN_PREFILL_TOKENS"  # reason of a decline

SHARE_ROUNDS = 60  # bisections of the largest micro-batch's work, enough for the last bit of a float


@dataclass(frozen=True)
class Batch:
    """A scheduled batch. Properties of all its requests that planning needs are computed only once.

    Attributes:
        query_lens: each request's number of tokens in this step, in batch order.
        prefill_tokens: number of tokens that belong to prefills.
        cuttable: whether the attention backends accept a request that is cut inside.
        decode_len: longest query that counts as a decode, drafts included. Each part of a cut request must be longer,
            or it would change from prefill to decode.
        context_lens: each request's number of tokens already in the KV cache; () if they were not read.
        cuts_decodes: whether the backends accept a decode with drafts that is cut inside, where ranks agreed on the
            cut.
    """

    query_lens: tuple[int, ...]
    prefill_tokens: int
    cuttable: bool = True
    decode_len: int = 1
    context_lens: tuple[int, ...] = ()
    cuts_decodes: bool = True

    @property
    def tokens(self) -> int:
        """Number of tokens of all requests."""
        return self.starts[-1]

    @cached_property
    def starts(self) -> Sequence[int]:
        """Offset of each request's first token, then of the end [requests + 1]."""
        requests = len(self.query_lens)
        if self.query_lens.count(1) == requests:  # all are decodes, as in most steps
            return range(requests + 1)
        return list(accumulate(self.query_lens, initial=0))

    @cached_property
    def long_requests(self) -> Sequence[int]:
        """Indices of the requests that do not have exactly one token. Padding may have none."""
        singles = self.query_lens.count(1)
        if self.query_lens[:singles].count(1) == singles:  # decodes come first, as vLLM often orders them
            return range(singles, len(self.query_lens))
        return [number for number, length in enumerate(self.query_lens) if length != 1]

    @property
    def contexts(self) -> tuple[int, ...]:
        """Each request's number of tokens already in the KV cache; 0 if they were not read."""
        return self.context_lens or (0,) * len(self.query_lens)

    def pad(self, tokens: int) -> Batch:
        """Return the batch padded at its end to *tokens* tokens. It may be cut anywhere in the padding."""
        padding = tokens - self.tokens
        if padding <= 0:
            return self
        contexts = self.context_lens and (*self.context_lens, *(0,) * padding)
        return replace(self, query_lens=(*self.query_lens, *(1,) * padding), context_lens=contexts)


@dataclass(frozen=True, slots=True)
class BatchSlice:
    """A micro-batch: half-open ranges of requests and tokens. A request that is cut inside is in two micro-batches."""

    first_request: int
    last_request: int
    first_token: int
    last_token: int

    @property
    def requests(self) -> slice:
        """The requests of this micro-batch, for indexing."""
        return slice(self.first_request, self.last_request)

    @property
    def tokens(self) -> slice:
        """The tokens of this micro-batch, for indexing."""
        return slice(self.first_token, self.last_token)

    @property
    def size(self) -> int:
        """Number of tokens of this micro-batch."""
        return self.last_token - self.first_token


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Minimum requirements for splitting a step without a prediction. By default every step that can be split is.

    Attributes:
        tokens: fewest tokens.
        prefill_tokens: fewest tokens of prefills.
        share: smallest micro-batch, as a share of an even one.
    """

    tokens: int = 1
    prefill_tokens: int = 0
    share: float = 0.0

    def check_tokens(self, tokens: int) -> Decline | None:
        """Return why a step of *tokens* tokens is never split; None if that depends on more than the number."""
        if tokens < self.tokens:
            return Decline(FEW_TOKENS, f"{tokens} < {self.tokens}")
        return None

    def check_prefill(self, tokens: int) -> Decline | None:
        """Return why a step with this many prefill *tokens* is not split, or None."""
        if tokens < self.prefill_tokens:
            return Decline(FEW_PREFILL_TOKENS, f"{tokens} < {self.prefill_tokens}")
        return None

    def choose(self, batch: Batch, parts: int) -> tuple[BatchSlice, ...] | Decline:
        """Return how to split *batch* into *parts* micro-batches, or why not.

        Returns fewer micro-batches than *parts* if the batch does not allow more cuts.
        """
        early = self.check_tokens(batch.tokens) or self.check_prefill(batch.prefill_tokens)
        if early is not None:
            return early
        cuts = place_cuts(batch, share_evenly(batch, parts))
        if not cuts:
            return Decline("nowhere to cut", f"{len(batch.query_lens)} requests, {batch.tokens} tokens")
        slices = slice_batch(batch, cuts)
        smallest = min(piece.size for piece in slices)
        if smallest < self.share * batch.tokens / len(slices):
            return Decline(
                "no balanced cut", f"the smallest micro-batch would have {smallest} of {batch.tokens} tokens"
            )
        return slices

    def choose_data_parallel(self, tokens: Sequence[int], parts: int) -> tuple[tuple[int, ...], ...] | Decline:
        """Return each data parallel rank's tokens in each micro-batch [micro-batches][ranks], or why not to split.

        A pure function of each rank's *tokens* [ranks], the only number that ranks know of each other, so every rank
        knows the cuts of all ranks. Ranks communicate in every micro-batch, so either all of them split or none, into
        equally many micro-batches, as even as possible. Only the largest rank must reach the minimum of tokens: the
        other ranks wait for it, so all ranks gain the time that it hides. Prefills of other ranks are not known.
        """
        most = max(tokens)
        early = self.check_tokens(most)
        if early is not None:
            return Decline(early.reason, f"{early.detail} on rank {tokens.index(most)}, which has the most")
        return share_data_parallel(tokens, parts)


def share_data_parallel(tokens: Sequence[int], parts: int) -> tuple[tuple[int, ...], ...] | Decline:
    """Return each rank's tokens in each micro-batch [micro-batches][ranks], as even as possible.

    There are *parts* micro-batches, or fewer if the largest rank has fewer tokens. A rank with fewer tokens than
    micro-batches, or with very few compared to the largest rank, puts all its tokens into the first micro-batch, so
    that its requests stay whole. In each other micro-batch it has one token of padding, because it must take part.
    """
    most, fewest = max(tokens), min(tokens)
    count = min(parts, most)
    if count < min(parts, 2) or fewest < 1:
        return Decline("nowhere to cut", f"ranks have {fewest} to {most} tokens for {parts} micro-batches")
    smallest = max(count, BOUNDARY_TOLERANCE * most / count)
    shares = [[own] + [1] * (count - 1) if own < smallest else split_evenly(own, count) for own in tokens]
    return tuple(tuple(own[part] for own in shares) for part in range(count))


def list_shares(tokens: Sequence[int], counts: Iterable[int]) -> list[tuple[tuple[int, ...], ...]]:
    """Return the different ways to share out *tokens* [ranks] over each number of micro-batches that is possible."""
    shares = dict.fromkeys(share_data_parallel(tokens, parts) for parts in counts)
    return [sizes for sizes in shares if not isinstance(sizes, Decline)]


def split_evenly(tokens: int, parts: int) -> list[int]:
    """Return the number of *tokens* in each part, as even as possible [parts]."""
    edges = [tokens * part // parts for part in range(parts + 1)]
    return [right - left for left, right in pairwise(edges)]


def share_evenly(batch: Batch, micro_batches: int) -> tuple[int, ...]:
    """Return the token offsets that cut a batch into micro-batches of equal size [micro-batches - 1]."""
    return tuple(round(part * batch.tokens / micro_batches) for part in range(1, micro_batches))


def share_by_work(work: Sequence[float], micro_batches: int) -> tuple[int, ...]:
    """Return the indices of requests to cut before, to minimize the largest *work* [requests] of a micro-batch.

    No request is cut inside. Returns fewer cuts if another cut would not reduce the maximum.
    """
    low, high = max(work, default=0.0), sum(work)
    for _ in range(SHARE_ROUNDS):
        middle = (low + high) / 2
        low, high = (low, middle) if len(_fill(work, middle)) < micro_batches else (middle, high)
    return _fill(work, high)


def _fill(work: Sequence[float], limit: float) -> tuple[int, ...]:
    """Return cuts so that no micro-batch has more work than *limit*, unless a single request has more."""
    cuts, filled = [], 0.0
    for request, amount in enumerate(work):
        if request and filled + amount > limit:
            cuts.append(request)
            filled = 0.0
        filled += amount
    return tuple(cuts)


def place_cuts(batch: Batch, targets: Sequence[int]) -> tuple[int, ...]:
    """Return the token offsets to cut at: those nearest to *targets*, preferring a request boundary that is close.

    Takes the nearest boundary. vllm-ascend #941 takes the first boundary within its tolerance.
    """
    share = batch.tokens / (len(targets) + 1)
    starts, last = batch.starts, len(batch.query_lens)
    cuts: list[int] = []
    for target in targets:
        following = bisect_left(starts, target, 1, last)
        nearest = starts[max(following - 1, 1) : min(following + 1, last)]
        boundary = min(nearest, key=lambda cut: abs(cut - target), default=None)
        near = boundary is not None and abs(boundary - target) <= BOUNDARY_TOLERANCE * share
        inside = None if near or not batch.cuttable else _cut_inside(batch, target, max(cuts, default=0))
        cut = boundary if inside is None else inside
        if cut is not None and 0 < cut < batch.tokens:
            cuts.append(cut)
    return tuple(sorted(set(cuts)))


def slice_batch(batch: Batch, cuts: Sequence[int], agreed: bool = False) -> tuple[BatchSlice, ...]:
    """Turn token offsets into micro-batches.

    If other ranks *agreed* on the cuts, a part of a request may be as short as a decode. Backends compute it like any
    prompt that short; only the rounding differs.

    Raises:
        SplitError: the cuts are not increasing offsets inside the batch; or a cut is inside a request, and the backend
            does not allow it, or a part of the request would be so short that it turns from prefill into decode.
    """
    edges = [0, *cuts, batch.tokens]
    if any(left >= right for left, right in pairwise(edges)):
        raise SplitError(f"cuts {tuple(cuts)} must increase and lie inside the batch of {batch.tokens} tokens.")
    starts = batch.starts
    for before, cut, after in zip(edges, cuts, edges[2:], strict=False):
        request = bisect_right(starts, cut) - 1
        if cut == starts[request]:
            continue
        if not batch.cuttable:
            raise SplitError(f"cut {cut} is inside request {request}, which this attention backend does not support.")
        if batch.query_lens[request] <= batch.decode_len and not batch.cuts_decodes:
            raise SplitError(
                f"cut {cut} is inside request {request}, a decode of {batch.query_lens[request]} tokens with drafts, "
                "which this attention backend has not been shown to support."
            )
        head, tail = cut - max(before, starts[request]), min(after, starts[request + 1]) - cut
        if not agreed and min(head, tail) <= batch.decode_len:
            raise SplitError(
                f"cut {cut} leaves request {request} a piece of {min(head, tail)} tokens; pieces need more than "
                f"{batch.decode_len}, or prefill would turn into decode."
            )
    return tuple(
        BatchSlice(bisect_right(starts, left) - 1, bisect_left(starts, right), left, right)
        for left, right in pairwise(edges)
    )


def _cut_inside(batch: Batch, target: int, previous: int) -> int | None:
    """Return the allowed cut nearest to *target*, after *previous* and inside the request of *target*, or None."""
    starts = batch.starts
    request = bisect_right(starts, target, hi=len(batch.query_lens)) - 1  # the last request, if target is the very end
    shortest = batch.decode_len + 1
    low, high = max(starts[request], previous) + shortest, starts[request + 1] - shortest
    return min(max(target, low), high) if low <= high else None
