"""The key-value store through which the ranks of vLLM's world met. Read against vLLM 0.23.0 to 0.33.0.

Unlike a collective, waiting for a key times out if a rank never sets it.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_KEY = "dbo_runtime/rank-{}"
_OUTCOME = "dbo_runtime/{}/rank-{}"


def announce_rank() -> None:
    """Let the other ranks know that dbo_runtime is switched on in this one."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        _get_store().set(_KEY.format(dist.get_rank()), "on")


def find_silent_ranks(patience: float) -> list[int]:
    """Return the ranks of vLLM's world that have not called `announce_rank` within *patience* seconds.

    Raises:
        DistError: raised by torch if the rank that keeps the store has ended meanwhile.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return []
    store, keys = _get_store(), [_KEY.format(rank) for rank in range(dist.get_world_size())]
    try:
        store.wait(keys, timedelta(seconds=patience))
    except dist.DistError:
        return [rank for rank, key in enumerate(keys) if not store.check([key])]
    return []


def report_outcome(name: str, outcome: str) -> str:
    """Publish this rank's outcome of the operation *name*; return the key's name for this occasion.

    A counter distinguishes repeated operations of one name. Ranks that perform the same operations use the same names.
    """
    store, rank = _get_store(), dist.get_rank()
    times = store.add(_OUTCOME.format(f"{name}/times", rank), 1)
    store.set(_OUTCOME.format(f"{name}/{times}", rank), outcome)
    return f"{name}/{times}"


def read_outcomes(name: str, ranks: Sequence[int], patience: float) -> list[str | None]:
    """Return the outcomes that *ranks* of vLLM's world reported within *patience* seconds; None for missing ones.

    Raises:
        DistError: raised by torch if the rank that keeps the store has ended meanwhile.
    """
    store, keys = _get_store(), [_OUTCOME.format(name, rank) for rank in ranks]
    try:
        store.wait(keys, timedelta(seconds=patience))
    except RuntimeError:  # torch raises DistError, but not from every kind of store
        return [store.get(key).decode() if store.check([key]) else None for key in keys]
    return [store.get(key).decode() for key in keys]


def _get_store() -> Store:
    """Return the store of the default process group, which is that of vLLM's world in all these versions."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()
