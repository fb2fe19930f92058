"""Ranks that must do the same thing agree on it before any of them begins.

Whether and where to split follows from numbers that all ranks already hold (`Thresholds.choose_data_parallel`). Each
data parallel rank has its own batch, and may find a reason against splitting that other ranks cannot see. They
therefore vote on each step that is to be split. Tensor parallel ranks have the same batch, and compare each new plan
once. All ranks compare at start, and with DBO_CHECK=1 in each step.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from dbo_runtime.bounded import BoundedDict
from dbo_runtime.decline import Decline, LocalDecline
from dbo_runtime.errors import ConfigError, ScheduleError
from dbo_runtime.observe.counts import Outcome
from dbo_runtime.outside_files import MAX_FILE_BYTES, parse_json

if TYPE_CHECKING:
    from vllm.distributed.parallel_state import GroupCoordinator

Plan = TypeVar("Plan")

_DECLINES = 0
MAX_GATHERED_BYTES = MAX_FILE_BYTES  # per rank; a trace of a large step has about 2 MiB
MAX_AGREED_PLANS = 256  # limit of plans kept; all ranks drop the same ones, and agree on them again


class Agreement:
    """The agreement of ranks that communicate in a step.

    Args:
        group: vLLM's coordinator of these ranks.
        count: function called for each disagreement with its outcome: the step runs `unsplit`, or ends in an `error`;
            None to count nothing.
    """

    def __init__(self, group: GroupCoordinator, count: Callable[[Outcome], None] | None = None) -> None:
        self._group = group
        self._count = count
        self._agreed: BoundedDict[Hashable, None] = BoundedDict(MAX_AGREED_PLANS)

    @property
    def ranks(self) -> int:
        """Number of ranks that agree."""
        return int(self._group.world_size)

    @property
    def size_and_capacity(self) -> tuple[int, int]:
        """Number of plans agreed on, and the limit."""
        return len(self._agreed), self._agreed.max_size

    def copy_for(self, group: GroupCoordinator) -> Agreement:
        """Return an agreement for *group*, without any plans agreed on."""
        return Agreement(group)

    def agree(self, own: Plan | LocalDecline, statement: str) -> Plan | Decline:
        """Return what all ranks do: *own*, or the first rank's reason against it.

        Every rank must call this in the same steps. Ranks exchange one integer each: a hash of *statement*, the text
        that must be equal on all ranks that can run the step.

        Raises:
            ScheduleError: the ranks are about to do different things.
        """
        if self._group.world_size == 1:
            return own.decline if isinstance(own, LocalDecline) else own
        gathered = self._gather(_DECLINES if isinstance(own, LocalDecline) else _fingerprint(statement))
        if _DECLINES in gathered:
            if any(gathered):
                self._note("unsplit")
            return self._get_first_decline(own)
        if len(set(gathered)) > 1:
            self.compare(statement)
        assert not isinstance(own, LocalDecline), "then it is among what was gathered"
        return own

    def compare_once(self, key: Hashable, statement: str) -> None:
        """Raise ScheduleError unless *statement* is equal on all ranks. Checks each *key* once, until it is dropped.

        For ranks with the same batch, so that either all of them call this with the same key or none does.
        """
        if self._group.world_size == 1 or key in self._agreed:
            return
        if len(set(self._gather(_fingerprint(statement)))) > 1:
            self.compare(statement)
        self._agreed[key] = None

    def compare(self, statement: str) -> None:
        """Raise ScheduleError, with the text of each rank, unless *statement* is equal on all. Collective, slow."""
        disagreement = describe_disagreement(self._group, statement)
        if disagreement is not None:
            self._note("error")
            raise ScheduleError(f"ranks decided differently for one step; please report this. {disagreement}")

    def gather(self, own: Any) -> list[Any]:
        """Return the plain data of all ranks, in rank order; see the function `gather`. Collective, slow."""
        return gather(self._group, own)

    def find_first(self, own: str) -> str:
        """Return, on all ranks, the text of the first rank that has one; empty if none has. Collective, slow."""
        return next(filter(None, self.gather(own)), "")

    def _note(self, outcome: Outcome) -> None:
        if self._count is not None:
            self._count(outcome)

    def _gather(self, own: int) -> list[int]:
        gathered = [torch.empty(1, dtype=torch.int64) for _ in range(self._group.world_size)]
        dist.all_gather(gathered, torch.tensor([own]), group=self._group.cpu_group)
        return [int(one) for one in gathered]

    def _get_first_decline(self, own: object) -> Decline:
        """Return the decline that all ranks report: the one of the first rank that has one."""
        local = own.decline if isinstance(own, LocalDecline) else None
        declines = gather(self._group, None if local is None else [local.reason, local.detail])
        rank, (reason, detail) = next((rank, decline) for rank, decline in enumerate(declines) if decline is not None)
        return Decline(str(reason), f"rank {rank}{f': {detail}' if detail else ''}")


def gather(group: GroupCoordinator, own: Any) -> list[Any]:
    """Return the plain data of each rank of *group*, in rank order. Collective, slow.

    Data are sent as JSON, so that nothing a rank sends can execute on another rank, as pickles of `all_gather_object`
    can. Tuples become lists and dictionary keys become text. This also applies to this rank's own data, so that all
    ranks see the same.

    Raises:
        ScheduleError: a rank sends too much, or no JSON.
    """
    if group.world_size == 1:
        return [own]
    return [_parse(rank, text) for rank, text in enumerate(exchange_bytes(group, json.dumps(own).encode()))]


def exchange_bytes(group: GroupCoordinator, own: bytes) -> list[bytes]:
    """Return the bytes that each rank sends. All are padded to the longest for the exchange."""
    counts = [torch.empty(1, dtype=torch.int64) for _ in range(group.world_size)]
    dist.all_gather(counts, torch.tensor([len(own)]), group=group.cpu_group)
    sizes = [int(count) for count in counts]
    if max(sizes) > MAX_GATHERED_BYTES:
        raise ScheduleError(
            f"ranks send {sizes} bytes; at most {MAX_GATHERED_BYTES} of each are read. Please report it."
        )
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
    received = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(received, padded, group=group.cpu_group)
    return [data.numpy().tobytes()[:size] for data, size in zip(received, sizes, strict=True)]


def _parse(rank: int, text: bytes) -> Any:
    try:
        return parse_json(text.decode())
    except (ValueError, ConfigError) as error:
        raise ScheduleError(f"rank {rank} sent no JSON ({error}); give all ranks the same packages.") from None


def describe_disagreement(group: GroupCoordinator, own: str) -> str | None:
    """Return the values of all ranks if they differ, else None. Collective, slow.

    Ranks that disagree would issue different collectives, and hang without a message.
    """
    gathered = gather(group, own)
    return None if all(other == gathered[0] for other in gathered) else format_ranks(gathered)


def format_ranks(values: Sequence[object]) -> str:
    """Return one line with the value of each rank."""
    return "; ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))


def _fingerprint(statement: str) -> int:
    return int.from_bytes(hashlib.sha256(statement.encode()).digest()[:7], "big") + 1  # never _DECLINES
