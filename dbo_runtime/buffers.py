"""The memory that a graph reads its inputs from: filled before each replay, padded up to a bucket. Used by `graphs`.

Nothing here imports torch: only methods of tensors are called.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeGuard

from dbo_runtime.errors import DeviceError
from dbo_runtime.executor import Inputs, Outputs

Counts = Sequence["int | None"]  # the tokens of each micro-batch; None where no input has a dimension


class Rows(NamedTuple):
    """The shape and dtype of a tensor in a graph; *are_padded* if its rows are tokens."""

    shape: tuple[int, ...]
    dtype: Any
    are_padded: bool


class Form(NamedTuple):
    """The inputs of a micro-batch in a graph; None for an input that is None."""

    bucket: int | None
    inputs: tuple[Rows | None, ...]


class Buffers:
    """Tensors that stay in their place, for inputs of these forms.

    Attributes:
        inputs: to run a schedule on in place of *given*; zeros at first.
    """

    def __init__(self, forms: Sequence[Form], given: Inputs) -> None:
        self.inputs: list[list[Any]] = [
            [
                None if rows is None else value.new_zeros(rows.shape)
                for rows, value in zip(form.inputs, values, strict=True)
            ]
            for form, values in zip(forms, given, strict=True)
        ]
        self._forms = forms

    def fill(self, given: Inputs, counts: Counts) -> None:
        """Copy inputs in, and zeros into the rows of padding: ops may have written there, too."""
        for form, buffers, values, count in zip(self._forms, self.inputs, given, counts, strict=True):
            for rows, buffer, value in zip(form.inputs, buffers, values, strict=True):
                if rows is not None and rows.are_padded and count != form.bucket:
                    buffer[:count].copy_(value)
                    buffer[count:].zero_()
                elif rows is not None:
                    buffer.copy_(value)

    def read(self, outputs: Outputs, counts: Counts) -> Outputs:
        """Return copies of results, without rows of padding: those of tensors with as many rows as the bucket.

        Raises:
            DeviceError: for a result that is neither a tensor nor None.
        """
        return [
            tuple(_copy(value, form.bucket, count) for value in values)
            for form, values, count in zip(self._forms, outputs, counts, strict=True)
        ]


def is_tensor(value: Any) -> TypeGuard[Any]:
    """Return whether a value can be held in buffers."""
    return hasattr(value, "new_zeros")


def are_near(one: Outputs, other: Outputs, tolerance: float) -> bool:
    """Return whether results differ by *tolerance* times the largest of *other* at most. Waits for the device."""
    pairs = ((a, b) for few, many in zip(one, other, strict=True) for a, b in zip(few, many, strict=True))
    return all(a is b if a is None or b is None else _is_near(a.cpu(), b.cpu(), tolerance) for a, b in pairs)


def _copy(value: Any, bucket: int | None, count: int | None) -> Any:
    if value is None:
        return None
    if not is_tensor(value):
        raise DeviceError(f"a result is a {type(value).__name__}: only tensors can be copied out of a graph's memory.")
    return (value[:count] if value.shape[:1] == (bucket,) else value).clone()


def _is_near(one: Any, other: Any, tolerance: float) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if bool(((one == other) | ((one != one) & (other != other))).all()):  # the same number, or none in both
        return True
    return tolerance > 0 and bool((one - other).abs().max() <= tolerance * other.abs().max())
