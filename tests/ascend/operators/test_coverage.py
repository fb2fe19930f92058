"""Every operator of the stand-in for CANN's is called as vllm-ascend calls it, and compared."""

from __future__ import annotations

import importlib
from pathlib import Path

from standin_ascend import operators

from tests.support.ascend.operators.cases import CASES, WITHOUT_KERNELS
from tests.support.ascend.operators.checks import BETWEEN_RANKS, COVERED


def test_every_operator_has_a_test() -> None:
    for file in Path(__file__).parent.glob("test_*.py"):
        importlib.import_module(f"tests.ascend.operators.{file.stem}")  # says what it covers
    names = {f"{namespace}::{name}" for namespace, functions in operators.OPERATORS.items() for name in functions}
    assert names == COVERED | BETWEEN_RANKS
    assert names == {case.operator for case in CASES} | WITHOUT_KERNELS | BETWEEN_RANKS
