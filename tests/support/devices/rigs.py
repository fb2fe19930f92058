"""What a contract test needs of a device beyond its protocol: something to write on, and a latch.

On streams a task has returned long before its kernels run, so what a test looks at must be on the device: a pad is a
tensor there, a latch is a value in its memory that a stream waits for.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from dbo_runtime.devices import Device, Task, Values, open_device
from dbo_runtime.errors import DeviceError
from tests.support.latch import TIMEOUT, Latch

STREAMS = ("npu", "cuda")
NAMES = ("cpu", "virtual", *STREAMS)
_EMPTY = -1
_LENGTH = 256  # of a pad


class HostRig:
    """Tasks that do at once what they do."""

    def __init__(self, name: str) -> None:
        self.device: Device = open_device(name)
        self.has_latch = name == "cpu"  # virtual time runs on the calling thread: it cannot be held

    def make_pad(self) -> Values:
        return []

    def note(self, number: int) -> Task:
        """Return a task that appends a number to the pad it is run on."""
        return lambda pad: pad.append(number)

    def read(self, pad: Values) -> list[int]:
        """Return what is on a pad now, whatever is still to come."""
        return list(pad)

    def make_latch(self) -> HostLatch:
        return HostLatch()

    def close(self) -> None:
        self.device.close()


class HostLatch(Latch):
    """A latch whose two sides are tasks, too."""

    def hold(self, _: Values) -> None:
        self.pass_when_released()

    def let_go(self, _: Values) -> None:
        self.release()


class StreamRig:
    """Tasks whose kernels run later, on streams."""

    has_latch = True

    def __init__(self, name: str) -> None:
        self.device: Any = open_device(name)
        self.backend = self.device.backend
        self._reader = self.backend.Stream()
        self._latches: list[StreamLatch] = []

    def make_pad(self) -> Values:
        pad = [self._make_tensor(_LENGTH, _EMPTY)]
        self.backend.synchronize()
        return pad

    def note(self, number: int) -> Task:
        """Return a task whose kernels shift a number in at the end of a pad, with memory of their own lane."""
        import torch

        def shift_in(pad: Values) -> None:
            pad[0].copy_(torch.cat([pad[0][1:], self._make_tensor(1, number)]))

        return shift_in

    def read(self, pad: Values) -> list[int]:
        """Return what is on a pad now, by a stream that waits for no other."""
        with self.backend.stream(self._reader):
            return [number for number in pad[0].cpu().tolist() if number != _EMPTY]

    def drain(self) -> None:
        """Wait until all that was issued is on its stream: until then torch_npu's host queue keeps tensors alive.

        Reading the handle of a stream does that.
        """
        getattr(self.backend.current_stream(), f"{self.device.name}_stream")

    def make_latch(self) -> StreamLatch:
        flag = self._make_tensor(1, 0)
        self.backend.synchronize()
        self._latches.append(StreamLatch(self.device.name, self.backend, flag))
        return self._latches[-1]

    def close(self) -> None:
        for latch in self._latches:
            latch.close()
        self.device.close()
        self.backend.synchronize()

    def _make_tensor(self, length: int, value: int) -> Any:
        import torch

        return torch.full((length,), value, dtype=torch.int64, device=self.device.name)


class StreamLatch:
    """A value in device memory; a stream that is held waits until another stream writes it.

    Both are done by the driver, not by a kernel: a kernel that spins could keep others from running.
    """

    def __init__(self, name: str, backend: Any, flag: Any) -> None:
        self._backend = backend
        self._flag = flag
        self._releaser = backend.Stream()
        self._wait, self._write = _find_functions(name)
        self._watchdog = threading.Timer(TIMEOUT, self.release)  # a test that fails must not hang
        self._watchdog.daemon = True

    def hold(self, _: Values) -> None:
        """Let the current stream wait."""
        self._watchdog.start()
        self._wait(self._backend.current_stream(), self._flag.data_ptr())

    def let_go(self, _: Values) -> None:
        """Let the current stream write."""
        self._write(self._backend.current_stream(), self._flag.data_ptr())

    def release(self) -> None:
        """Write now."""
        self._write(self._releaser, self._flag.data_ptr())

    def close(self) -> None:
        """End the watchdog."""
        self._watchdog.cancel()


def find_present() -> list[str]:
    """Return the devices that tests run on here. Those that are missing are reported once, by the contract."""
    try:
        import torch
    except ImportError:
        return [name for name in NAMES if name not in STREAMS]
    missing = set() if importlib.util.find_spec("torch_npu") else {"npu"}
    missing |= set() if torch.cuda.is_available() else {"cuda"}
    return [name for name in NAMES if name not in missing]


def open_rig(name: str) -> HostRig | StreamRig:
    """Open a device for tests, or skip and say why it is not there."""
    if name not in STREAMS:
        return HostRig(name)
    prepare(name)
    try:
        return StreamRig(name)
    except DeviceError as error:
        pytest.skip(str(error))


def prepare(name: str) -> None:
    """Load the stand-in for CANN where *name* is the NPU; skip without torch_npu, fail if the build fails."""
    if name != "npu":
        return
    if importlib.util.find_spec("torch_npu") is None:
        pytest.skip("torch_npu is not installed here: `make test-npu` makes an environment that has it")
    error = load_standin()
    if error is not None:
        pytest.fail(error, pytrace=False)


@functools.cache  # a build that fails takes minutes, and every test would repeat it
def load_standin() -> str | None:
    """Build and load the stand-in for CANN, unless CANN itself is here; return why that failed, if it did."""
    from tests.standin.cann import cann
    from tests.standin.cann.build import StandInError

    try:
        cann.load()
    except StandInError as error:
        return str(error)
    return None


@contextmanager
def count_switches(device: Any) -> Iterator[list[Any]]:
    """Yield a list of the streams that a device makes current."""
    switches: list[Any] = []
    set_stream = device.backend.set_stream

    def switch(stream: Any) -> None:
        switches.append(stream)
        set_stream(stream)

    device.backend.set_stream = switch
    try:
        yield switches
    finally:
        device.backend.set_stream = set_stream


def _find_functions(name: str) -> Sequence[Callable[[Any, int], None]]:
    """Return how a stream is made to wait for 1 in memory, and to write 1 there."""
    if name == "npu":
        from tests.standin.cann import cann

        return (
            lambda stream, address: cann.Latch(address).hold(stream.npu_stream),
            lambda stream, address: cann.Latch(address).release(stream.npu_stream),
        )
    driver = ctypes.CDLL("libcuda.so.1")
    arguments = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint)
    functions = driver.cuStreamWaitValue32_v2, driver.cuStreamWriteValue32_v2
    for function in functions:
        function.argtypes, function.restype = arguments, ctypes.c_int

    def call(function: Any, stream: Any, address: int) -> None:
        at_least = 0  # CU_STREAM_WAIT_VALUE_GEQ, and the default way to write
        assert function(stream.cuda_stream, address, 1, at_least) == 0

    wait, write = functions
    return (lambda stream, address: call(wait, stream, address), lambda stream, address: call(write, stream, address))
