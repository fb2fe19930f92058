"""Whether the way in which ranks communicate leaves anything to hide."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from dbo_runtime.decline import Decline

_ON_ONE_HOST = "all ranks are on one host, where communication takes the cores that compute"
_NOTHING_TO_HIDE = {
    "none": "no layer is spread over ranks",
    "shared memory": _ON_ONE_HOST,
    "one host": _ON_ONE_HOST,
}

HIDES_NOTHING: Mapping[str, Decline] = MappingProxyType(
    {transport: Decline("no communication to hide", why) for transport, why in _NOTHING_TO_HIDE.items()}
)
"""Transports whose communication is not worth overlapping, each with the decline of its steps."""


def check_transport(transport: str, mode: str, has_costs: bool, can_use_side: bool) -> Decline | None:
    """Decline every step if there is no communication to hide; in mode `auto` only.

    Costs change that where all ranks are on one host: they say whether communication is worth hiding. And concurrent
    compute lanes pay without any communication.

    Args:
        transport: means of communication between the ranks; see `Platform.get_transport`.
        mode: `DBO_MODE`.
        has_costs: whether a planner decides by costs.
        can_use_side: whether these costs let ops run on the second compute lane.
    """
    if mode != "auto" or (has_costs and (transport == "one host" or can_use_side)):
        return None
    return HIDES_NOTHING.get(transport)
