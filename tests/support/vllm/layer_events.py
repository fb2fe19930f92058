"""What a KV connector is told of a layer, and when the layer attends. Without vLLM, which not all tests can import."""

from __future__ import annotations

from typing import NamedTuple

WAIT, WRITTEN, ATTEND, SAVE = "wait", "written", "attend", "save"


class Event(NamedTuple):
    """One call in a layer.

    Attributes:
        what: `wait`, `written` (of vllm-ascend), `attend` or `save`.
        layer: its name.
        tokens: that attend; of a save, those that its attention metadata has.
        saved: a sum for each token of the step, read from the cache, where it is written or saved.
        is_whole: of a save, whether its attention metadata is that of the step.
    """

    what: str
    layer: str
    tokens: int = 0
    saved: tuple[float, ...] = ()
    is_whole: bool = True
