"""Ranks that have to do the same thing compare what they are about to do."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def find_disagreement(group: Any, own: Any) -> str | None:
    """Return who says what if the ranks of a tensor parallel *group* do not all say *own*; collective, slow.

    Ranks that disagree issue different collectives, and hang without a word.
    """
    if group.world_size == 1:
        return None
    said: list[Any] = [None] * group.world_size
    dist.all_gather_object(said, own, group=group.cpu_group)
    if all(other == said[0] for other in said):
        return None
    return "; ".join(f"rank {rank}: {what}" for rank, what in enumerate(said))
