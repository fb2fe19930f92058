"""Expert-parallel dispatch and combine over torch.distributed: send tokens to their experts, and results back.

Two dispatchers share one interface. `AllGather` sends every token to every rank. The sizes are known beforehand, so the
host never waits for the device. `AllToAll` sends a token only to ranks that hold one of its experts. The sizes depend
on the routing. So ranks exchange them first, and the host has to read them, as with DeepEP's high-throughput kernels.
An all-to-all padded to the maximum would need no sizes either. But the maximum is all tokens of a rank, so it would
move as much as `AllGather`.

The `CombineHandle` holds all state between dispatch and combine, so any number of micro-batches may be in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from dbo_runtime.errors import SplitError

# torch 2.13 renames it and warns about the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class QuantizedTokens(NamedTuple):
    """Tokens in a smaller data type, for experts with quantized weights.

    Attributes:
        x: integers of the tokens [tokens, hidden].
        scales: factor of each token's integers, in fp32 [tokens].
    """

    x: torch.Tensor
    scales: torch.Tensor


class Routing(NamedTuple):
    """Where the tokens of this rank go, for one micro-batch.

    Attributes:
        weights: weights of each token's experts [tokens, top_k].
        ids: global numbers of each token's experts [tokens, top_k].
        sizes: number of tokens of every rank in this micro-batch, including this rank [ranks].
        counts: number of rows that this rank sends to every rank, and receives from it [2, ranks]; None before ranks
            have exchanged sizes.
        chosen: whether each token goes to each rank [tokens, ranks]; None if every token goes to every rank.
        quantized: quantized tokens to send in place of the tokens; None to send them in their own data type.
        latent: projection of the tokens to send in place of them [tokens, latent]; None if experts read the tokens.
    """

    weights: torch.Tensor
    ids: torch.Tensor
    sizes: tuple[int, ...]
    counts: torch.Tensor | None = None
    chosen: torch.Tensor | None = None
    quantized: QuantizedTokens | None = None
    latent: torch.Tensor | None = None


class DispatchedTokens(NamedTuple):
    """The tokens received from all ranks, in rank order.

    Attributes:
        x: the tokens [received, hidden].
        weights, ids: weights and numbers of the tokens' experts, including experts on other ranks [received, top_k].
        scales: factor of each token [received]; None unless the tokens were quantized before they were sent.
    """

    x: torch.Tensor
    weights: torch.Tensor
    ids: torch.Tensor
    scales: torch.Tensor | None = None


class CombineHandle(NamedTuple):
    """The state that `combine` needs to return results. It does not need the received tokens: they may be freed first.

    Attributes:
        sent, received: number of rows sent to every rank, and received from it [ranks].
        tokens: number of tokens of this rank in the micro-batch.
        rows: number of the token of each row sent [sum of sent]; None if every token went to every rank.
    """

    sent: tuple[int, ...]
    received: tuple[int, ...]
    tokens: int
    rows: torch.Tensor | None = None


class Dispatcher(Protocol):
    """Sends tokens to experts. Every rank of the group must make the same calls in the same order."""

    @property
    def exchanges_sizes(self) -> bool:
        """Whether ranks exchange sizes before `dispatch`. If so, `dispatch` waits for the sizes."""

    def choose_ranks(self, routing: Routing) -> Routing:
        """Compute which token goes to which rank, without communication."""

    def exchange_sizes(self, routing: Routing) -> Routing:
        """Exchange how many rows each rank receives. Collective. `dispatch` calls it, unless it was called before."""

    def dispatch(self, x: torch.Tensor, routing: Routing) -> tuple[DispatchedTokens, CombineHandle]:
        """Send the tokens *x* [tokens, hidden] to the ranks of their experts. Collective.

        If *routing* has quantized tokens, or a projection, these are sent in place of *x*.

        Raises:
            SplitError: if *x* does not have the number of tokens that the other ranks expect.
        """

    def combine(self, partial: torch.Tensor, handle: CombineHandle) -> torch.Tensor:
        """Return results [received, hidden] to their ranks and sum them -> [tokens, hidden]. Collective."""


class AllGather:
    """Sends every token to every rank, and returns results by a reduce-scatter: `allgather_reducescatter` in vLLM.

    Args:
        group: the communicator. It must be used by one lane only.
    """

    exchanges_sizes = False

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._ranks = dist.get_world_size(group)
        self._rank = dist.get_rank(group)

    def choose_ranks(self, routing: Routing) -> Routing:
        """Return *routing* unchanged: every token goes to every rank."""
        return routing

    def exchange_sizes(self, routing: Routing) -> Routing:
        """Return *routing* unchanged: all sizes are known."""
        return routing

    def dispatch(self, x: torch.Tensor, routing: Routing) -> tuple[DispatchedTokens, CombineHandle]:
        """Gather the tokens of all ranks, and their routing."""
        _check_size(x, routing, self._rank)
        tokens = _send(x, routing, lambda rows: gather_rows(rows, routing.sizes, self._group))
        return tokens, CombineHandle((x.shape[0],) * self._ranks, routing.sizes, x.shape[0])

    def combine(self, partial: torch.Tensor, handle: CombineHandle) -> torch.Tensor:
        """Return this rank's tokens, summed over the ranks in rank order."""
        return reduce_rows(partial, handle.received, self._group)


class AllToAll:
    """Sends each token only to the ranks that hold one of its experts, and returns only their results.

    Args:
        group: the communicator. It must be used by one lane only.
        owners: the rank that holds each expert [experts], on the device of the tokens.
    """

    exchanges_sizes = True

    def __init__(self, group: dist.ProcessGroup, owners: torch.Tensor) -> None:
        self._group = group
        self._ranks = dist.get_world_size(group)
        self._rank = dist.get_rank(group)
        self._owners = owners

    def choose_ranks(self, routing: Routing) -> Routing:
        """Mark the ranks that each token goes to. A token goes to a rank only once, even for several experts."""
        chosen = torch.zeros((routing.ids.shape[0], self._ranks), dtype=torch.bool, device=routing.ids.device)
        chosen.scatter_(1, self._owners[routing.ids.long()], True)
        return routing._replace(chosen=chosen)

    def exchange_sizes(self, routing: Routing) -> Routing:
        """Exchange how many rows every rank sends to every other."""
        sent = _require(routing.chosen).sum(dim=0)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self._group)
        return routing._replace(counts=torch.stack([sent, received]))

    def dispatch(self, x: torch.Tensor, routing: Routing) -> tuple[DispatchedTokens, CombineHandle]:
        """Wait for the sizes; then send each token's row to every rank marked for it."""
        _check_size(x, routing, self._rank)
        if routing.counts is None:
            routing = self.exchange_sizes(routing)
        sent, received = (tuple(counts) for counts in _require(routing.counts).tolist())
        rows = _require(routing.chosen).t().nonzero()[:, 1]  # by rank, then by token
        tokens = _send(x, routing, lambda each: exchange_rows(each[rows], sent, received, self._group))
        return tokens, CombineHandle(sent, received, x.shape[0], rows)

    def combine(self, partial: torch.Tensor, handle: CombineHandle) -> torch.Tensor:
        """Return this rank's tokens, each the sum of its ranks' results, in fp32.

        On CUDA torch sums in no fixed order, so the last bit may differ from run to run.
        """
        returned = exchange_rows(partial, handle.received, handle.sent, self._group)
        summed = returned.new_zeros((handle.tokens, *returned.shape[1:]), dtype=torch.float32)
        return summed.index_add_(0, _require(handle.rows), returned.float()).to(returned.dtype)


def count_chunk(tokens: int, ranks: int) -> int:
    """Return the number of tokens in each rank's chunk if *tokens* are padded to equal chunks, as in vLLM."""
    return -(-tokens // ranks)


def pad_chunks(x: torch.Tensor, ranks: int) -> torch.Tensor:
    """Return *x* [tokens, ...] padded with zeros at its end to equal chunks [ranks * chunk, ...]."""
    padding = count_chunk(x.shape[0], ranks) * ranks - x.shape[0]
    if not padding:
        return x
    kept = (0, 0) * (x.dim() - 1)  # no padding in the other dimensions; torch takes the last dimension first
    return torch.nn.functional.pad(x, (*kept, 0, padding))


def gather_rows(x: torch.Tensor, sizes: Sequence[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Return the rows of all ranks in rank order [sum of sizes, ...]; *x* are the rows of this rank. Collective."""
    ranks = len(sizes)
    if len(set(sizes)) == 1:
        gathered = x.new_empty((ranks * sizes[0], *x.shape[1:]))
        _all_gather(gathered, x.contiguous(), group=group)
        return gathered
    copies = x.repeat(ranks, *(1 for _ in x.shape[1:]))  # about as large as the result
    return exchange_rows(copies, (x.shape[0],) * ranks, sizes, group)


def reduce_rows(x: torch.Tensor, sizes: Sequence[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Sum *x* [sum of sizes, ...] over the ranks and return this rank's rows. Collective.

    It is an all-to-all and a sum, not a reduce-scatter, for three reasons:

    - It moves as many bytes, and supports any sizes on any backend.
    - It sums in rank order for any sizes, if it runs on the CPU and on up to four ranks. Beyond that, torch's `sum`
      picks an order by the shape.
    - With gloo on two ranks it took a third of the time: 1.1 against 3.3 ms for [2000, 256] in fp32 (2026-11-20).
    """
    own = sizes[dist.get_rank(group)]
    parts = exchange_rows(x, sizes, (own,) * len(sizes), group)
    return parts.view(len(sizes), own, *x.shape[1:]).sum(dim=0)


def exchange_rows(
    x: torch.Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """Send *sent[r]* rows of *x* to each rank r; return *received[r]* rows from each, in rank order. Collective."""
    result = x.new_empty((sum(received), *x.shape[1:]))
    dist.all_to_all_single(result, x.contiguous(), list(received), list(sent), group=group)
    return result


def _send(x: torch.Tensor, routing: Routing, send: Callable[[torch.Tensor], torch.Tensor]) -> DispatchedTokens:
    """Send tokens. Their weights, ids and scales go as one tensor of bits, as even a small collective costs latency."""
    weights, ids, quantized = routing.weights, routing.ids, routing.quantized
    columns = [weights.float().view(torch.int32), ids.int()]
    x = x if routing.latent is None else routing.latent
    if quantized is not None:
        x = quantized.x
        columns.append(quantized.scales[:, None].view(torch.int32))
    arrived = torch.split(send(torch.cat(columns, dim=1)), [column.shape[1] for column in columns], dim=1)
    floats = [column.contiguous().view(torch.float32) for column in (arrived[0], *arrived[2:])]
    scales = None if quantized is None else floats[1][:, 0]
    return DispatchedTokens(send(x), floats[0].to(weights.dtype), arrived[1].to(ids.dtype).contiguous(), scales)


def _check_size(x: torch.Tensor, routing: Routing, rank: int) -> None:
    if x.shape[0] != routing.sizes[rank]:
        raise SplitError(
            f"rank {rank} dispatches {x.shape[0]} tokens, but all ranks expect {routing.sizes[rank]} of it (sizes "
            f"{routing.sizes}): its batch was not cut where the ranks agreed to. Please report it."
        )


def _require(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None, "choose_ranks comes first"
    return tensor
