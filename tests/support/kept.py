"""Results that are kept in build/ (which git ignores), so that a part may be run again alone, and a table is of all."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Mapping
from typing import Any

from tests.support.page import ROOT

FOLDER = ROOT / "build"


def keep(name: str, found: Mapping[str, Any]) -> dict[str, Any]:
    """Add results to those of earlier runs, which they replace by key; return all. Several processes may do so.

    They are kept until their file is removed, whatever has changed in the code since.
    """
    FOLDER.mkdir(exist_ok=True)
    with (FOLDER / f"{name}.json").open("a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        kept: dict[str, Any] = {**json.loads(file.read() or "{}"), **found}
        file.truncate(0)
        file.write(json.dumps(kept, indent=1))
    return kept
