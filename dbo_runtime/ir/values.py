"""Symbolic values, which stand for tensors while a program is recorded, and the way inputs are cut."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from dbo_runtime.errors import ProgramError


@dataclass(frozen=True, slots=True)
class Value:
    """A symbolic name for an op's result: a tensor, or any other object."""

    index: int
    name: str

    def __str__(self) -> str:
        return f"%{self.index}:{self.name}"

    def _fail(self, *_: Any) -> Any:
        raise ProgramError(
            f"{self} is a value of a program, not a tensor: while a program is recorded nothing may compute with it. "
            f"Move the computation into a function and declare it with p.compute(...). ({locate_caller()})"
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __matmul__ = __rmatmul__ = _fail
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = _fail
    __and__ = __or__ = __xor__ = __invert__ = __neg__ = __abs__ = __lt__ = __le__ = __gt__ = __ge__ = _fail
    __getitem__ = __setitem__ = __iter__ = __len__ = __bool__ = __int__ = __float__ = __index__ = _fail

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copy, pickle and friends probe for these; they must see a plain AttributeError
            raise AttributeError(name)
        return self._fail()


@dataclass(frozen=True, slots=True)
class Input(Value):
    """A value that the caller passes in by name, and how it is cut into micro-batches.

    Attributes:
        token_dim: the dimension that tokens are counted along; None if the input is not cut by tokens.
        request_dim: the dimension that requests are counted along; None if the input is not cut by requests.
        nano_batch: number of the nano-batch whose part it is; None if it is for all tokens of the micro-batch.
    """

    token_dim: int | None = field(default=0, compare=False)  # not part of the value's identity
    request_dim: int | None = field(default=None, compare=False)
    nano_batch: int | None = field(default=None, compare=False)

    def cut(self, given: Any, tokens: slice, requests: slice) -> Any:
        """Return the part of *given* for the micro-batch with these tokens and requests; all of it if it is not cut."""
        if self.token_dim is not None:
            return given[_index(self.token_dim, tokens)]
        return given if self.request_dim is None else given[_index(self.request_dim, requests)]


def locate_caller() -> str:
    """Return the `file:line` of the nearest frame outside the calling module: the adapter's line."""
    frame = sys._getframe(1)
    recording = (frame.f_code.co_filename, contextmanager.__code__.co_filename)
    while frame.f_back is not None and frame.f_code.co_filename in recording:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _index(dim: int, piece: slice) -> Any:
    """Return the index that takes *piece* along dimension *dim*. For dimension 0 it also works on lists."""
    if dim == 0:
        return piece
    return (slice(None),) * dim + (piece,) if dim > 0 else (..., piece) + (slice(None),) * (-dim - 1)
