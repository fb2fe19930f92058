"""What tests of operators have in common: they draw tensors, put them on the NPU, compare, and say what they cover."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

# torch_npu says so once for some operators; the stand-in knows no other format.
ANY_FORMAT = pytest.mark.filterwarnings("ignore:Cannot create tensor with internal format:UserWarning")

HALF = torch.bfloat16  # what vllm-ascend computes in
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, HALF: 1e-2}
NO_MASK, CAUSAL = 0, 3  # CANN's sparse_mode; causal: the last query sees all keys
SOFTMAX, SIGMOID = range(2)
BEST, SUM_OF_TWO = range(2)  # by what a group of experts is chosen
CUMULATED, COUNTS = range(2)  # how the tokens of each expert are told
ABSENT = -77.0  # what is in memory that an operator has not written

SEEDS = st.integers(0, 2**16)
SIZES = st.sampled_from([2, 8, 16])
FLOATS = st.sampled_from(list(TOLERANCE))
Tensors = list[torch.Tensor]

CALLED: set[str] = set()
COVERED: set[str] = set()
BETWEEN_RANKS: set[str] = set()  # that communicate: tests call them in processes of their own


def covers(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Say which operators a test compares, for `test_coverage.py`; the test fails unless it calls them."""
    COVERED.update(names)

    def wrap(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(*arguments: Any, **options: Any) -> None:
            CALLED.clear()
            test(*arguments, **options)
            assert set(names) <= CALLED

        return run

    return wrap


def note(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function of an operator, which notes that it was called."""

    @functools.wraps(function)
    def run(*arguments: Any, **options: Any) -> Any:
        CALLED.add(name)
        return function(*arguments, **options)

    return run


def npu() -> Any:
    """Return torch_npu, which can be imported only when the stand-in is loaded."""
    import torch_npu

    return torch_npu


def make_generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def draw(generator: torch.Generator, *shape: int, dtype: torch.dtype = HALF) -> torch.Tensor:
    return torch.randn(shape, generator=generator).to(dtype)


def put(*tensors: torch.Tensor) -> Tensors:
    return [tensor.npu() for tensor in tensors]


def assert_near(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype | None = None) -> None:
    """Compare in value and shape, as exactly as numbers of this type, or of the found one, allow."""
    tolerance = TOLERANCE[dtype or found.dtype]
    torch.testing.assert_close(found.cpu().float(), expected.float(), rtol=tolerance, atol=tolerance, equal_nan=True)


def assert_equal(found: Any, expected: Any) -> None:
    """Compare to the last bit: tensors, or as many of them."""
    if not isinstance(found, torch.Tensor):
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other)
    else:
        torch.testing.assert_close(found.cpu(), expected.cpu(), rtol=0.0, atol=0.0, equal_nan=True)
