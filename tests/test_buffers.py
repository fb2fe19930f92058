"""The memory of a graph: what is filled in, what is read out, and when two results are near."""

from __future__ import annotations

import math
from typing import Any

import pytest

from dbo_runtime.buffers import Buffers, Form, Rows, are_near
from dbo_runtime.errors import DeviceError

torch = pytest.importorskip("torch")

NAN = math.nan
FORM = Form(4, (Rows((4, 2), None, True), None, Rows((3,), None, False)))


def make_inputs(rows: int) -> list[tuple[Any, ...]]:
    return [(torch.ones(rows, 2), None, torch.arange(3.0))]


def are_numbers_near(one: list[float], other: list[float], tolerance: float = 0.0) -> bool:
    return are_near([(torch.tensor(one),)], [(torch.tensor(other),)], tolerance)


def test_buffers_begin_with_zeros_of_the_bucket() -> None:
    (given,) = Buffers([FORM], make_inputs(2)).inputs
    assert given[0].tolist() == [[0.0, 0.0]] * 4
    assert given[1] is None
    assert given[2].tolist() == [0.0] * 3


def test_rows_of_padding_become_zeros_again() -> None:
    buffers = Buffers([FORM], make_inputs(4))
    buffers.fill(make_inputs(4), [4])
    assert buffers.inputs[0][0].tolist() == [[1.0, 1.0]] * 4
    buffers.fill(make_inputs(1), [1])
    assert buffers.inputs[0][0].tolist() == [[1.0, 1.0]] + [[0.0, 0.0]] * 3
    assert buffers.inputs[0][2].tolist() == [0.0, 1.0, 2.0]


def test_what_is_read_has_no_padding_and_is_a_copy() -> None:
    buffers = Buffers([FORM], make_inputs(2))
    results = torch.ones(4, 4), torch.ones(3), None, torch.tensor(1.0)
    (read,) = buffers.read([results], [2])
    assert [None if value is None else tuple(value.shape) for value in read] == [(2, 4), (3,), None, ()]
    results[0].zero_()
    assert bool(read[0].all())


def test_a_result_that_is_no_tensor_cannot_be_read() -> None:
    with pytest.raises(DeviceError, match="a result is a int: only tensors"):
        Buffers([FORM], make_inputs(2)).read([(1,)], [2])


def test_results_are_near_if_all_of_them_are() -> None:
    one, other = torch.zeros(2), torch.ones(2)
    assert are_near([(one, None), (other,)], [(one, None), (other,)], 0.0)
    assert not are_near([(one,), (one,)], [(one,), (other,)], 0.0)
    assert not are_near([(one, one)], [(other, one)], 0.0)
    assert not are_near([(None,)], [(one,)], 0.0)
    assert not are_near([(one,)], [(None,)], 0.0)


@pytest.mark.parametrize("other", [torch.ones(3, 1), torch.ones(2), torch.ones(3, dtype=torch.float64)])
def test_results_of_another_shape_or_dtype_are_not_near(other: Any) -> None:
    assert not are_near([(torch.ones(3),)], [(other,)], 1.0)


def test_only_no_number_in_both_is_the_same() -> None:
    assert are_numbers_near([1.0, NAN], [1.0, NAN])
    assert not are_numbers_near([1.0, NAN], [1.0, 2.0])
    assert not are_numbers_near([1.0, 2.0], [1.0, NAN])
    assert not are_numbers_near([1.0, NAN], [1.0, 2.0], 1.0)


@pytest.mark.parametrize(("tolerance", "expected"), [(0.0, False), (0.24, False), (0.25, True), (0.5, True)])
def test_the_tolerance_is_relative_to_the_largest_value_of_the_other(tolerance: float, expected: bool) -> None:
    assert are_numbers_near([0.0, 8.0], [1.0, 4.0], tolerance) is False
    assert are_numbers_near([0.0, 3.0], [1.0, 4.0], tolerance) is expected
