"""The names that docs/public-api.md lists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def read_public_names() -> dict[str, set[str]]:
    """Return the public names of each module, as the page on the public API lists them."""
    page = (ROOT / "docs" / "public-api.md").read_text()
    rows = re.findall(r"^\| `(dbo_runtime[.\w]*)` \| ([^|]+) \|", page, re.MULTILINE)
    return {module: set(re.findall(r"`(\w+)`", names)) for module, names in rows}
