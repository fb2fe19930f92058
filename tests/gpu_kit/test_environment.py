"""The environment in which the kit is tried: of the Python that the machine with the GPU has."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tools.gpu_kit.wheels import PYTHON
from tools.set_up import MACHINE_PYTHON, SetUpError, dotted, find_python


def test_its_python_is_the_one_that_wheels_are_got_for() -> None:
    assert dotted(MACHINE_PYTHON) == PYTHON


def test_a_python_that_is_not_there_is_named() -> None:
    with pytest.raises(SetUpError, match=r"no python3\.99 is found: install it, or name one by `make PYTHON=`"):
        find_python((3, 99))


def test_a_python_that_is_there_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "python3.98").symlink_to(sys.executable)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_python((3, 98)).startswith("/")
