"""Ranks that have to do the same thing agree on it before any of them begins.

Whether and where to split follows from numbers that all ranks hold already (`batch.decide_data_parallel`), so as a rule
nobody asks. Ranks ask each other at start, once for every new plan, where a rank may have a reason of its own, and in
each step under DBO_CHECK.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from dbo_runtime.decline import Decline
from dbo_runtime.errors import ScheduleError
from dbo_runtime.runtime import ExecutionPlan

_DECLINES = 0


class Agreement:
    """What the ranks that communicate in a step settle about it.

    Args:
        group: vLLM's coordinator of all of them.
        votes: whether one rank may have reasons against a step that the others cannot know. Prefix caching makes such
            (`hazards.check_prefix_cache`); each step that could be split is then put to the vote.
    """

    def __init__(self, group: Any, votes: bool = False) -> None:
        self._group = group
        self._votes = votes
        self._settled: set[Hashable] = set()

    def copy_for(self, group: Any) -> Agreement:
        """Return an agreement that has settled nothing yet."""
        return Agreement(group, self._votes)

    def agree(self, own: ExecutionPlan | Decline, key: Hashable, statement: str) -> ExecutionPlan | Decline:
        """Return what all ranks do: *own*, or the first rank's reason against it.

        Every rank must get here in the same steps with the same *key*, which names the plan before it is made.
        *statement* is what must be equal on all of them. The first time of a key, ranks compare; later only if they
        vote. Their collective is one integer a rank. A plan that all of them compared and do not vote on is one that
        no rank has reasons of its own against; if this one has, it must not go another way than the others.

        Raises:
            ScheduleError: if the ranks are about to do different things, or this rank alone cannot follow.
        """
        if self._group.world_size == 1:
            return own
        if key in self._settled and not self._votes:
            if isinstance(own, Decline):
                raise ScheduleError(
                    f"all ranks agreed to split this step, and this one cannot: {own}. Please report it; DBO_MODE=off "
                    "serves unsplit meanwhile."
                )
            return own
        said = self._gather(_DECLINES if isinstance(own, Decline) else _fingerprint(statement))
        if _DECLINES in said:
            return self._explain(own)
        if len(set(said)) > 1:
            self.compare(statement)
        self._settled.add(key)
        return own

    def compare(self, statement: str) -> None:
        """Raise ScheduleError, with what each rank says, unless all say *statement*. Collective, slow."""
        disagreement = find_disagreement(self._group, statement)
        if disagreement is not None:
            raise ScheduleError(f"ranks decided differently for one step; please report this. {disagreement}")

    def gather(self, own: Any) -> list[Any]:
        """Return what each rank says, in rank order. Collective, slow."""
        return gather(self._group, own)

    def _gather(self, own: int) -> list[int]:
        said = [torch.empty(1, dtype=torch.int64) for _ in range(self._group.world_size)]
        dist.all_gather(said, torch.tensor([own]), group=self._group.cpu_group)
        return [int(one) for one in said]

    def _explain(self, own: ExecutionPlan | Decline) -> Decline:
        """Return the decline that all ranks report: that of the first rank that has one."""
        reasons = gather(self._group, own if isinstance(own, Decline) else None)
        rank, first = next((rank, reason) for rank, reason in enumerate(reasons) if reason is not None)
        return Decline(first.reason, f"rank {rank}{': ' + first.detail if first.detail else ''}")


def gather(group: Any, own: Any) -> list[Any]:
    """Return what each rank of *group* says. Collective, slow."""
    if group.world_size == 1:
        return [own]
    said: list[Any] = [None] * group.world_size
    dist.all_gather_object(said, own, group=group.cpu_group)
    return said


def find_disagreement(group: Any, own: Any) -> str | None:
    """Return who says what if the ranks of *group* do not all say *own*; collective, slow.

    Ranks that disagree issue different collectives, and hang without a word.
    """
    said = gather(group, own)
    return None if all(other == said[0] for other in said) else format_ranks(said)


def format_ranks(said: Sequence[Any]) -> str:
    """Return who says what."""
    return "; ".join(f"rank {rank}: {what}" for rank, what in enumerate(said))


def _fingerprint(statement: str) -> int:
    return int.from_bytes(hashlib.sha256(statement.encode()).digest()[:7], "big") + 1  # never _DECLINES
