"""Small helpers of the tests that drive the real torch_npu on the stand-in."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import torch


def make_streams(count: int) -> list[Any]:
    """Return streams that differ; there are 32, after which torch_npu begins anew."""
    return [torch.npu.Stream() for _ in range(count)]


def list_values(tensor: torch.Tensor) -> list[float]:
    """Return the values that occur in a tensor."""
    return tensor.cpu().unique().tolist()


def run_script(script: str, **environment: str) -> str:
    """Run Python on the stand-in in a process of its own, which must end well, and return what it prints."""
    start = "from tests.standin.cann import cann\nstandin = cann.load()\nimport torch, torch_npu\n"
    done = subprocess.run(
        [sys.executable, "-c", start + script],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
