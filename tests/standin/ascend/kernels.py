"""Kernels in Python, queued on streams of the stand-in for CANN as those of an NPU are.

A kernel computes on the host's view of device memory when its stream comes to it. So whatever reads too early reads
what is there, as on an NPU.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import itertools
import os
import traceback
from collections.abc import Callable
from typing import Any

import torch

FUNCTION = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)


class Queue:
    """The way of a Python kernel to a stream, and all that are on it. One lives as long as its process."""

    def __init__(self) -> None:
        self._kernels: dict[int, Callable[[], None]] = {}
        self._numbers = itertools.count(1)
        self._has_graphs = False
        self._raises = bool(os.environ.get("STANDIN_ASCEND"))
        self._failed = ""
        self._call = FUNCTION(self._run)
        self._runtime = ctypes.CDLL("libascendcl.so")  # the stand-in, which is loaded
        arguments = ctypes.c_void_p, ctypes.c_char_p, FUNCTION, ctypes.c_void_p
        self._runtime.standin_submit_function.argtypes = arguments
        self._devices: set[int] = set()
        atexit.register(self._finish)

    def submit(self, name: str, kernel: Callable[[], None]) -> None:
        """Queue a kernel on the current stream, or note it in the graph that is being captured there.

        Raises:
            RuntimeError: inside vLLM, if an earlier one has failed. vLLM waits for events, which say nothing of that.
        """
        failed, self._failed = self._failed, ""
        if failed and self._raises:
            raise RuntimeError(f"a kernel of the stand-in has failed: {failed}")
        self._has_graphs |= torch.npu.is_current_stream_capturing()
        self._devices.add(torch.npu.current_device())
        number = next(self._numbers)
        self._kernels[number] = kernel
        error = self._runtime.standin_submit_function(
            torch.npu.current_stream().npu_stream, name.encode(), self._call, number
        )
        if error:
            raise RuntimeError(f"the stand-in refused the kernel {name} with error {error}")

    def _run(self, number: int) -> int:
        kernel = self._kernels[number]
        if not self._has_graphs:  # which run theirs again and again, and are given new ones
            del self._kernels[number]
        try:
            with torch.inference_mode():
                kernel()
        except BaseException as error:  # noqa: BLE001 - the caller is C: not 0 fails the stream
            self._failed = repr(error)
            traceback.print_exc()
            return 1
        return 0

    def _finish(self) -> None:
        """Wait for all kernels, before torch_npu does at its end: it keeps the interpreter, which they need."""
        for device in self._devices:
            with contextlib.suppress(RuntimeError):  # a kernel that failed has said so
                torch.npu.synchronize(device)


@functools.cache
def open_queue() -> Queue:
    """Return this process's queue."""
    return Queue()


def launch(name: str, kernel: Callable[..., None], *arguments: Any) -> None:
    """Queue `kernel(*arguments)`; tensors on the device, in lists too, reach it as the host's view of their memory."""
    open_queue().submit(name, functools.partial(kernel, *map(view_on_host, arguments)))


def refuse(operator: str, options: dict[str, Any], *known: str) -> None:
    """Raise if an operator is called with others than its known options; torch leaves out what has its default."""
    unknown = sorted(options.keys() - set(known))
    if unknown:
        raise NotImplementedError(f"{operator} with {', '.join(unknown)}")


def view_on_host(value: Any) -> Any:
    """Return a tensor on the device, or a list of such, as tensors of the host on the same memory."""
    if isinstance(value, list | tuple):
        return [view_on_host(item) for item in value]
    if not isinstance(value, torch.Tensor) or value.device.type != "npu":
        return value
    storage = value.untyped_storage()
    if not storage.nbytes():
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    memory = (ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr())
    view = torch.empty(0, dtype=value.dtype)
    whole = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    return view.set_(whole, value.storage_offset(), value.shape, value.stride())
