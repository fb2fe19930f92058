"""What all tests on the stand-in share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.standin.cann import cann
from tests.standin.cann.build import build
from tests.support import suites

if TYPE_CHECKING:
    from tests.standin.cann.gate import StreamGate

# Where torch_npu is installed, a bare `import torch` would look for CANN and fail.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")


OBSTACLE = suites.STANDIN.explain_left_out()
collect_ignore_glob = (
    [] if OBSTACLE is None else ["test_[!b]*.py"]
)  # all but test_build.py, most of which runs anywhere


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs the stand-in."""
    if OBSTACLE is not None:
        skip = pytest.mark.skip(reason=f"the stand-in for CANN cannot be used: {OBSTACLE}")
        for item in items:
            if "standin_folder" in getattr(item, "fixturenames", ()):
                item.add_marker(skip)


@pytest.fixture(scope="session")
def standin_folder() -> Path:
    """Return the folder of the stand-in's libraries, for tests that load them in other processes."""
    return build()


@pytest.fixture(scope="session")
def standin(standin_folder: Path) -> cann.StandIn:
    """Return the stand-in, loaded, with the real torch_npu on it."""
    standin = cann.load()
    assert standin is not None
    import torch_npu  # noqa: F401 - only now that it finds its libraries

    return standin


@pytest.fixture(autouse=True)
def _default_stream(request: pytest.FixtureRequest) -> Iterator[None]:
    """Put the default stream back: torch leaves a capture's stream current where the end of the capture is refused."""
    yield
    if "standin" in request.fixturenames:
        import torch

        torch.npu.set_stream(torch.npu.default_stream())


@pytest.fixture
def gate(standin: cann.StandIn) -> Iterator[StreamGate]:
    """Return a gate that is open after the test, so that a test that fails does not leave streams held."""
    import torch

    from tests.standin.cann.gate import StreamGate

    gate = StreamGate()
    yield gate
    gate.open()
    torch.npu.synchronize()
