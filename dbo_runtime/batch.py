"""Where to cut a scheduled batch: integers in, integers out.

Nothing here knows of tensors. All ranks hold the same integers, so all come to the same answer.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from dbo_runtime.config import RuntimeConfig
from dbo_runtime.decline import Decline
from dbo_runtime.errors import SplitError

# A request boundary this near to the even cut (as a share of a micro-batch) is taken instead of a cut inside a request:
# it gives bit-identical results and spares the second attention over the head. #941 tolerated the same imbalance.
BOUNDARY_TOLERANCE = 0.1

# `auto` leaves a step whole if its smallest micro-batch would be below this share of an even one: it would pay the
# fixed cost of every collective again and hide next to nothing.
LEAST_SHARE = 0.1

SHARE_ROUNDS = 60  # of halving the range in which the least work of a micro-batch lies: to the last bit of a float


@dataclass(frozen=True, slots=True)
class Batch:
    """A scheduled batch.

    Attributes:
        query_lens: tokens of each request in this step, in batch order.
        prefill_tokens: how many of them belong to prefills.
        cuttable: whether the attention backends can take a request that is cut inside.
        decode_len: longest query that the backend treats as a decode; a piece of a cut request must be longer, or it
            would change from prefill to decode.
        context_lens: tokens of each request that are in the KV cache already; () where nobody asked.
    """

    query_lens: tuple[int, ...]
    prefill_tokens: int
    cuttable: bool = True
    decode_len: int = 1
    context_lens: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        """Tokens of all requests together."""
        return sum(self.query_lens)

    @property
    def contexts(self) -> tuple[int, ...]:
        """Tokens of each request that are in the KV cache already, 0 where nobody asked."""
        return self.context_lens or (0,) * len(self.query_lens)


@dataclass(frozen=True, slots=True)
class BatchSlice:
    """A micro-batch: half-open ranges of requests and of tokens. A request that is cut inside is in two slices."""

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
        """Number of tokens."""
        return self.last_token - self.first_token


def decline_early(tokens: int, config: RuntimeConfig) -> Decline | None:
    """Return why a step of *tokens* tokens runs whole whatever is in it, so that nobody need look at what is."""
    if config.mode == "off":
        return Decline("DBO_MODE is off")
    if config.mode == "auto" and tokens < config.min_tokens:
        return Decline("fewer tokens than DBO_MIN_TOKENS", f"{tokens} < {config.min_tokens}")
    return None


def decide(batch: Batch, config: RuntimeConfig) -> tuple[BatchSlice, ...] | Decline:
    """Decide whether to split, and where.

    The thresholds are those of vllm-ascend #941: at least 256 tokens in the step and 64 of them prefill, by default.
    `always` ignores them. The result may have fewer micro-batches than configured where there is nowhere to cut.
    """
    early = decline_early(batch.tokens, config)
    if early is not None:
        return early
    if config.mode == "auto" and batch.prefill_tokens < config.min_prefill_tokens:
        return Decline(
            "fewer prefill tokens than DBO_MIN_PREFILL_TOKENS",
            f"{batch.prefill_tokens} < {config.min_prefill_tokens}",
        )
    cuts = place_cuts(batch, share_evenly(batch, config.parts))
    if not cuts:
        return Decline("nowhere to cut", f"{len(batch.query_lens)} requests, {batch.tokens} tokens")
    slices = slice_batch(batch, cuts)
    least = min(piece.size for piece in slices)
    if config.mode == "auto" and least < LEAST_SHARE * batch.tokens / len(slices):
        return Decline("no balanced cut", f"the smallest micro-batch would have {least} of {batch.tokens} tokens")
    return slices


def decide_data_parallel(tokens: Sequence[int], config: RuntimeConfig) -> tuple[tuple[int, ...], ...] | Decline:
    """Decide for all data parallel ranks at once: the tokens of every rank in each micro-batch [micro-batches][ranks].

    A pure function of the one thing that ranks know of each other, *tokens* of each [ranks], so that each of them knows
    the cuts of all. They communicate in every micro-batch, so either all split or none does, into equally many parts,
    each as even as can be. `auto` asks for DBO_MIN_TOKENS on every rank; of the others' prefills nobody knows.
    """
    least = min(tokens)
    early = decline_early(least, config)
    if early is not None:
        return Decline(early.reason, f"{early.detail} on rank {tokens.index(least)}") if early.detail else early
    return share_data_parallel(tokens, config.parts)


def share_data_parallel(tokens: Sequence[int], parts: int) -> tuple[tuple[int, ...], ...] | Decline:
    """Return the tokens of every rank in each of *parts* micro-batches [micro-batches][ranks], as even as can be."""
    least = min(tokens)
    if least < parts:
        return Decline("nowhere to cut", f"rank {tokens.index(least)} has {least} tokens for {parts} micro-batches")
    edges = [[count * part // parts for part in range(parts + 1)] for count in tokens]
    return tuple(tuple(edge[part + 1] - edge[part] for edge in edges) for part in range(parts))


def share_evenly(batch: Batch, micro_batches: int) -> tuple[int, ...]:
    """Return the token offsets that would make micro-batches of equally many tokens [micro-batches - 1]."""
    return tuple(round(part * batch.tokens / micro_batches) for part in range(1, micro_batches))


def share_by_work(work: Sequence[float], micro_batches: int) -> tuple[int, ...]:
    """Return at which requests to cut so that the micro-batch with the most *work* [requests] has as little as can be.

    Each request stays whole. There are fewer cuts than asked for where another one would not make that any less.
    """
    low, high = max(work, default=0.0), sum(work)
    for _ in range(SHARE_ROUNDS):
        middle = (low + high) / 2
        low, high = (low, middle) if len(_fill(work, middle)) < micro_batches else (middle, high)
    return _fill(work, high)


def _fill(work: Sequence[float], most: float) -> tuple[int, ...]:
    """Return where to cut so that no part has more than *most*, but for requests that have more by themselves."""
    cuts, filled = [], 0.0
    for request, amount in enumerate(work):
        if request and filled + amount > most:
            cuts.append(request)
            filled = 0.0
        filled += amount
    return tuple(cuts)


def place_cuts(batch: Batch, targets: Sequence[int]) -> tuple[int, ...]:
    """Return the token offsets at which to cut: as near to *targets* as can be, a near request boundary preferred.

    Unlike #941, which took the first boundary within its tolerance, this takes the nearest.
    """
    share = batch.tokens / (len(targets) + 1)
    boundaries = list(accumulate(batch.query_lens))[:-1]
    cuts: list[int] = []
    for target in targets:
        boundary = min(boundaries, key=lambda cut: abs(cut - target), default=None)
        near = boundary is not None and abs(boundary - target) <= BOUNDARY_TOLERANCE * share
        inside = None if near or not batch.cuttable else _cut_inside(batch, target, max(cuts, default=0))
        cut = boundary if inside is None else inside
        if cut is not None and 0 < cut < batch.tokens:
            cuts.append(cut)
    return tuple(sorted(set(cuts)))


def slice_batch(batch: Batch, cuts: Sequence[int], agreed: bool = False) -> tuple[BatchSlice, ...]:
    """Turn token offsets into slices.

    *agreed* cuts are those that other ranks count on: they may leave a piece so short that the backend takes it for a
    decode. It does that with any prompt that short; only the rounding is another.

    Raises:
        SplitError: if the cuts are not increasing offsets inside the batch, or cut inside a request where the backend
            cannot, or so near its end that the piece would turn from prefill into decode.
    """
    edges = [0, *cuts, batch.tokens]
    if any(left >= right for left, right in pairwise(edges)):
        raise SplitError(f"cuts {tuple(cuts)} must increase and lie inside the batch of {batch.tokens} tokens.")
    starts = [0, *accumulate(batch.query_lens)]
    for before, cut, after in zip(edges, cuts, edges[2:], strict=False):
        request = bisect_right(starts, cut) - 1
        if cut == starts[request]:
            continue
        if not batch.cuttable:
            raise SplitError(f"cut {cut} is inside request {request}, which this attention backend cannot take.")
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
    """Return the allowed cut nearest to *target* inside the request that holds it and after *previous*, or None."""
    starts = [0, *accumulate(batch.query_lens)]
    request = bisect_right(starts, target, hi=len(batch.query_lens)) - 1  # the last one, if target is the very end
    least = batch.decode_len + 1
    low, high = max(starts[request], previous) + least, starts[request + 1] - least
    return min(max(target, low), high) if low <= high else None
