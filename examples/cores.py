"""The cores of this machine, shared among ranks."""

from __future__ import annotations

import os


def share_cores(ranks: int) -> str:
    """Return each rank's cores in vLLM's notation, such as "0,1|2,3": unbound, ranks get in each other's way."""
    cores = sorted(os.sched_getaffinity(0))
    each = max(1, len(cores) // ranks)
    shares = [[cores[(rank * each + n) % len(cores)] for n in range(each)] for rank in range(ranks)]
    return "|".join(",".join(map(str, share)) for share in shares)
