"""What passed last, and on which commit: `tests/ledger.json`, which only `python -m tools.shards run` writes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

FILE = "tests/ledger.json"
ABOUT = (
    "Written by `python -m tools.shards run` (`make test-shards`, `make test-all`), never by hand. "
    "`landing` counts the commits of this file. A shard has the landing, the commit and the date on which it last "
    "passed, the seconds of its tests on one core, how many passed, and a digest of its inputs. `null` means never "
    "recorded; such a shard counts from the landing that first named it."
)


@dataclass(frozen=True)
class Entry:
    """When a shard last passed, or since when it is named."""

    landing: int
    commit: str | None = None
    date: str | None = None
    seconds: int | None = None
    passed: int | None = None
    inputs: str | None = None
    """The digest of the shard's inputs."""


@dataclass(frozen=True)
class Ledger:
    """The entries of all shards."""

    landing: int = 0
    """How many commits of the ledger there were before this one."""
    entries: Mapping[str, Entry] = field(default_factory=dict)

    def get(self, name: str) -> Entry:
        """Return the entry of a shard; one that is new has none yet, and counts from now."""
        return self.entries.get(name, Entry(self.landing))

    def record(self, name: str, entry: Entry) -> Ledger:
        """Return the ledger with another entry for a shard."""
        return replace(self, entries={**self.entries, name: entry})

    def keep(self, names: Iterable[str]) -> Ledger:
        """Return the ledger with these shards, whether they have an entry or not, and no others."""
        return replace(self, entries={name: self.get(name) for name in names})


def read_ledger(root: Path) -> Ledger:
    """Read the ledger of a tree; where there is none, nothing was ever recorded."""
    path = root / FILE
    if not path.is_file():
        return Ledger()
    found = json.loads(path.read_text())
    return Ledger(found["landing"], {name: Entry(**each) for name, each in found["shards"].items()})


def write_ledger(root: Path, ledger: Ledger) -> None:
    """Write the ledger, one line for each shard."""
    rows = ",\n".join(f"    {json.dumps(name)}: {json.dumps(asdict(each))}" for name, each in ledger.entries.items())
    lines = [
        "{",
        f'  "about": {json.dumps(ABOUT)},',
        f'  "landing": {ledger.landing},',
        '  "shards": {',
        rows,
        "  }",
        "}",
    ]
    (root / FILE).write_text("\n".join(lines) + "\n")
