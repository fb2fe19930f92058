"""Lets vLLM's CUDA build take this machine for one with an H100, as far as imports, configuration and builders go.

Nothing is computed on it: a stand-in for the driver's library lets compiled code load, and what would ask a GPU is
answered here. Everything else is vLLM's and torch's own.
"""

from __future__ import annotations

import ctypes
import importlib.abc
import importlib.util
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

SOURCE = Path(__file__).with_name("libcuda.c")
CAPABILITY = (9, 0)
MEMORY_BYTES = 85 * 10**9


def load_libcuda(folder: Path) -> None:
    """Compile the stand-in, and load it under the name that libraries ask for."""
    library = folder / "libcuda.so.1"
    command = ["gcc", "-shared", "-fPIC", f"-Wl,-soname,{library.name}", "-o", str(library), str(SOURCE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not done.returncode, f"gcc does not compile {SOURCE}: {done.stderr}"
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def answer_for_driver(pynvml: Any) -> None:
    """Answer what vLLM asks NVIDIA's management library when it looks for its platform."""
    answers: dict[str, Any] = {
        "nvmlInit": None,
        "nvmlShutdown": None,
        "nvmlDeviceGetCount": 1,
        "nvmlDeviceGetHandleByIndex": 0,
        "nvmlDeviceGetHandleByUUID": 0,
        "nvmlDeviceGetIndex": 0,
        "nvmlDeviceGetCudaComputeCapability": CAPABILITY,
        "nvmlDeviceGetName": "NVIDIA H100 80GB HBM3",
        "nvmlDeviceGetUUID": "GPU-0000",
        "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=MEMORY_BYTES, free=MEMORY_BYTES, used=0),
        "nvmlDeviceGetPciInfo": SimpleNamespace(busId="00000000:00:04.0"),
        "nvmlDeviceGetNumaNodeId": 0,
        "nvmlSystemGetDriverVersion": "580.159.04",
    }
    for name, answer in answers.items():
        assert hasattr(pynvml, name), name
        setattr(pynvml, name, lambda *_, answer=answer: answer)


def activate_driver(module: Any) -> None:
    """Let Triton choose CUDA."""
    module.CudaDriver.is_active = staticmethod(lambda: True)


PATCHES: Mapping[str, Callable[[Any], None]] = {
    "vllm.third_party.pynvml": answer_for_driver,
    "triton.backends.nvidia.driver": activate_driver,
}


class Patcher(importlib.abc.MetaPathFinder):
    """Patches modules as soon as they are imported, before what imports them looks at them."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in PATCHES:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                PATCHES[name](module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


class FakeStream:
    """A stream, or an event, that a model makes for itself and that nothing is issued to."""

    stream_id = 1

    def __init__(self, *_: object, **__: object) -> None:
        pass


def get_device_properties(*_: object) -> SimpleNamespace:
    """Return what backends ask about the GPU."""
    return SimpleNamespace(
        name="NVIDIA H100 80GB HBM3",
        multi_processor_count=132,
        major=CAPABILITY[0],
        minor=CAPABILITY[1],
        total_memory=MEMORY_BYTES,
    )
