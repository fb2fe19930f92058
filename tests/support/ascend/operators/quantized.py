"""What quantized rows are compared with: a quantization that is written out row by row."""

from __future__ import annotations

import pytest
import torch


def quantize(row: list[float]) -> tuple[list[int], float]:
    """Round the values of one row so that its largest is 127."""
    largest = max(map(abs, row))
    return [round(value * 127 / largest) if largest else 0 for value in row], largest / 127


def assert_quantized(found: torch.Tensor, scales: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare rows with their quantization; a value in the middle of two integers may be rounded to either."""
    assert (found.dtype, scales.dtype, scales.shape) == (torch.int8, torch.float32, expected.shape[:-1])
    pairs = zip(found.flatten(0, -2).tolist(), scales.flatten().tolist(), expected.flatten(0, -2).tolist(), strict=True)
    for row, row_scale, values in pairs:
        integers, wanted = quantize(values)
        assert row_scale == pytest.approx(wanted, rel=1e-5)
        assert all(abs(one - other) <= 1 for one, other in zip(row, integers, strict=True))
        exact = [value / wanted if wanted else 0.0 for value in values]
        assert all(abs(one - other) <= 0.501 for one, other in zip(row, exact, strict=True))
