"""The class by which vLLM serves an architecture. Read against vLLM 0.23.0 to 0.33.0."""

from __future__ import annotations

import inspect
import re

from dbo_runtime.adapters.contract import ModelAdapter
from dbo_runtime.adapters.registry import get_backbone_adapter, name_backbones

_HELD = re.compile(r"self\.model\s*=\s*(\w+)\(")  # how a class of vLLM's makes the backbone that it holds


def find_adapter(architecture: str) -> ModelAdapter | None:
    """Return the adapter of the backbone of an architecture, by its name and by the class that vLLM serves it by.

    Raises:
        ProgramError: if the one registered cannot be loaded or is no adapter.
    """
    return get_backbone_adapter(architecture) or get_backbone_adapter(architecture, list_classes(architecture))


def list_classes(architecture: str) -> tuple[str, ...]:
    """Return the names of the class that serves an architecture, of those that it derives from, and of its backbone.

    The backbone is what its source says that it makes: the doctor asks where no model is loaded. None of an
    architecture that vLLM does not know.
    """
    from torch.nn import Module
    from vllm.model_executor.models.registry import ModelRegistry

    registered = ModelRegistry.models
    name = next((name for name in name_backbones(architecture) if name in registered), None)
    if name is None:
        return ()
    try:
        cls = registered[name].load_model_cls()
    except Exception:  # noqa: BLE001 - what it imports is not known, and vLLM will say why it cannot be
        return ()
    classes = cls.__mro__[: cls.__mro__.index(Module)]
    return (*(each.__name__ for each in classes), *(held for each in classes for held in _list_held(each)))


def _list_held(cls: type) -> list[str]:
    """Return the classes that the source of a class names as those of its backbone."""
    try:
        return _HELD.findall(inspect.getsource(vars(cls)["__init__"]))
    except (KeyError, OSError, TypeError):
        return []
