"""The class that vLLM serves an architecture with. Read against vLLM 0.23.0 to 0.33.0."""

from __future__ import annotations

import inspect
import re

from dbo_runtime.adapters.contract import ModelAdapter
from dbo_runtime.adapters.registry import get_backbone_adapter, name_backbones

_HELD = re.compile(r"self\.model\s*=\s*(\w+)\(")  # matches the line where a vLLM class creates its backbone


def find_adapter(architecture: str) -> ModelAdapter | None:
    """Return the adapter for an architecture's backbone, found by its name and by the vLLM class that serves it.

    Raises:
        ProgramError: the registered adapter cannot be loaded, or is no adapter.
    """
    return get_backbone_adapter(architecture) or get_backbone_adapter(architecture, list_classes(architecture))


def is_derived(architecture: str) -> bool:
    """Return whether an adapter is found only by a base class of the vLLM class that serves an architecture."""
    classes = list_classes(architecture)
    own = (architecture, *classes[:1])
    has_adapter = get_backbone_adapter(architecture, classes) is not None
    return has_adapter and all(get_backbone_adapter(name) is None for name in own)


def list_classes(architecture: str) -> tuple[str, ...]:
    """Return the names of the class that serves an architecture, of its base classes, and of its backbone.

    The backbone's class is read from the source of the class, because the doctor asks without loading a model. Empty
    for an architecture that vLLM does not know.
    """
    from torch.nn import Module
    from vllm.model_executor.models.registry import ModelRegistry

    registered = ModelRegistry.models
    name = next((name for name in name_backbones(architecture) if name in registered), None)
    if name is None:
        return ()
    try:
        cls = registered[name].load_model_cls()
    except Exception:  # noqa: BLE001 - unknown code is imported here; vLLM reports the cause later
        return ()
    classes = cls.__mro__[: cls.__mro__.index(Module)]
    return (*(each.__name__ for each in classes), *(held for each in classes for held in _list_held(each)))


def _list_held(cls: type) -> list[str]:
    """Return the class names of the backbone, as found in a class's source."""
    try:
        return _HELD.findall(inspect.getsource(vars(cls)["__init__"]))
    except (KeyError, OSError, TypeError):
        return []
