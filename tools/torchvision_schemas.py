"""Lets PyPI's torchvision load with a CPU build of torch: set-up copies this file into the environment.

That torchvision is built for CUDA. Its compiled half does not load here, silently, and its Python half then dies of two
operators that it describes further and that are declared nowhere. Declared they are enough: what resizes and normalizes
pictures is Python over torch. Nothing happens before torchvision is imported.
"""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any


class SchemaFinder(MetaPathFinder):
    """Finds nothing, but learns of the import of torchvision before anybody finds it."""

    def __init__(self) -> None:
        self.library: Any = None  # schemas last as long as it

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        """Declare the two operators if torchvision comes and cannot itself, and leave finding it to others."""
        if fullname == "torchvision" and self.library is None and not loads_compiled_half():
            import torch

            make_library: Any = torch.library.Library
            self.library = make_library("torchvision", "FRAGMENT")
            for operator in ("nms", "qnms"):
                self.library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def loads_compiled_half() -> bool:
    """Load torchvision's compiled half, which declares them, and return whether that worked."""
    import torch

    spec = PathFinder.find_spec("torchvision")
    folders = [] if spec is None else spec.submodule_search_locations or []
    libraries = [str(library) for folder in folders for library in Path(folder).glob("_C*.so")]
    load: Any = torch.ops.load_library
    try:
        for library in libraries:
            load(library)
    except OSError:
        return False
    return hasattr(torch.ops.torchvision, "nms")


sys.meta_path.insert(0, SchemaFinder())
