"""What a rehearsal of the GPU kit brings back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tools.gpu_kit.record import MOST_FILES, NOT_HERE


def read(folder: Path) -> dict[str, Any]:
    """Return the results of a rehearsal, as they come back."""
    out = folder / "out"
    assert len(list(out.iterdir())) <= MOST_FILES
    content: dict[str, Any] = json.loads((out / "results.json").read_text())
    return content


def find_failures(content: dict[str, Any]) -> dict[str, str]:
    return {name: part["failed"] for name, part in content["parts"].items() if part["failed"]}


def check_devices(parts: dict[str, Any]) -> None:
    measured = parts["core"]["measured"]
    assert set(measured["equal to the loop, to the bit"].values()) == {True}
    shares = [each for name, each in measured.items() if name.startswith("communication ")]
    assert len(shares) == 4
    assert all(share["gain"] > 0 and share["us an instruction"] > 0 for share in shares)
    assert all(rate > 0 for rate in parts["smoke"]["rates"].values())
    assert parts["frees"]["schedules"]["exit"] == 0
    assert parts["frees"]["fault"]["watched by"].startswith(NOT_HERE)
