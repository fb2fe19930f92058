"""Engrams: rows of a table that a layer adds for each token, by hashes of this token and those before it.

vllm-ascend looks the rows up before the forward, which is given those of each token. What a layer does with them is
token-wise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dbo_models.layers import get_layers
from dbo_runtime.adapter import name_argument
from dbo_runtime.decline import Decline

ROWS, MASK = "engram_lookups", "engram_mask"
EVENTS, EVENT, READ_BEFORE = "engram_pending", "engram_mask_ready_event", "lookback_token_ids"
HAS_ROWS = name_argument(MASK)


def list_engrams(decoder: Any) -> list[int]:
    """Return the numbers of the layers that add rows of an engram."""
    return [index for index, layer in get_layers(decoder).items() if layer.engram is not None]


def name_rows(index: int) -> str:
    """Return the name of the input for the rows of a layer's engram."""
    return name_argument(f"{ROWS}_{index}")


def take_rows(decoder: Any, given: Mapping[str, Any], tokens: int) -> dict[str, Any] | Decline:
    """Return the rows of each engram [tokens, columns], and which tokens have rows [tokens]; or why there are none.

    They are looked up on a stream of their own, for which the present one waits.
    """
    engrams, rows, mask = list_engrams(decoder), given.get(ROWS) or {}, given.get(MASK)
    unknown, has_mask = given.keys() - {ROWS, MASK, EVENTS, EVENT, READ_BEFORE}, mask is not None and mask.numel() > 0
    if unknown or (engrams and not (has_mask and rows.keys() >= {*engrams})):
        return Decline("unknown arguments of forward()", ", ".join(sorted(unknown or given)))
    if not engrams:
        return {}
    for event in (given.get(EVENT), *(given.get(EVENTS) or {}).values()):
        if event is not None:
            event.wait()
    assert mask is not None
    return {HAS_ROWS: mask[:tokens], **{name_rows(index): rows[index][:tokens] for index in engrams}}


def add_rows(decoder: Any, layer: Any, streams: Any, rows: Any, mask: Any) -> Any:
    """Return the streams [tokens, streams, hidden] with the rows [tokens, columns] added to tokens that have some."""
    return layer.engram(streams, rows, mask, decoder.engram_rotation if decoder.engram_rotated else None)
