"""Refuse a start in which dbo_runtime is enabled only on some ranks: they would wait for the others forever."""

from __future__ import annotations

from dbo_runtime.config import ENABLE
from dbo_runtime.errors import ConfigError
from dbo_runtime.vllm_plugin.api.rank_store import find_silent_ranks

# Ranks announce themselves before they load their weights, and look for each other afterwards. So this is the longest
# time by which one rank may finish loading before another begins to load.
PATIENCE_SECONDS = 20.0


def require_all_ranks(patience: float = PATIENCE_SECONDS) -> None:
    """Return once dbo_runtime is known to be enabled on all ranks. Call this before any collective of this package.

    Raises:
        ConfigError: a rank has not announced itself within *patience* seconds. The message names it.
    """
    silent = find_silent_ranks(patience)
    if silent:
        names = ", ".join(f"rank {rank}" for rank in silent)
        raise ConfigError(
            f"{names} of vLLM's world did not answer within {patience:.0f} s. Set {ENABLE}=1 on all ranks and hosts, "
            "or on none; dbo_runtime must be installed on all of them, with the same version of vLLM, and not be left "
            "out by VLLM_PLUGINS."
        )
