"""What all tests of operators share: the stand-in with these operators, gates for its streams, and inference mode."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.standin.cann import cann
from tests.support import suites

if TYPE_CHECKING:  # what needs torch or vllm-ascend is imported only where they are installed
    from tests.standin.cann.gate import StreamGate

collect_ignore_glob = [] if suites.ASCEND.explain_left_out() is None else ["test_*.py"]


@pytest.fixture(scope="module")
def standin() -> Iterator[cann.StandIn]:
    """Return the loaded stand-in, with these operators for as long as the tests of one file run.

    Other tests of the same process compare operators of the same names that the stand-in itself has.
    """
    loaded = cann.load()
    assert loaded is not None
    import torch
    import torch_npu  # noqa: F401 - only now that it finds its libraries
    from standin_ascend import operators

    from tests.support.ascend.operators.checks import note

    with pytest.MonkeyPatch.context() as patch:
        for namespace, functions in operators.OPERATORS.items():
            for name, function in functions.items():
                patch.setitem(functions, name, note(f"{namespace}::{name}", function))
        libraries = operators.register()
    yield loaded
    torch.npu.synchronize()
    for library in libraries:
        library._destroy()
    operators.register.cache_clear()


@pytest.fixture
def gate(standin: cann.StandIn) -> Iterator[StreamGate]:
    """Return a gate that is open after the test, so that a test that fails does not leave streams held."""
    import torch

    from tests.standin.cann.gate import StreamGate

    gate = StreamGate()
    yield gate
    gate.open()
    torch.npu.synchronize()


@pytest.fixture(autouse=True)
def _as_in_vllm() -> Iterator[None]:
    """Compute in inference mode, as vLLM does: else some operators of torch_npu call others, for gradients."""
    import torch

    with torch.inference_mode():
        yield
