"""What git knows about a tree. Where there is no git, or no history, each question has an answer all the same."""

from __future__ import annotations

import subprocess
from collections.abc import Collection
from pathlib import Path

from .ledger import FILE

COMMITS = 100  # that count as a landing where none of them recorded any shard


class History:
    """The history of one tree."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def find_commit(self) -> str | None:
        """Return the commit that is checked out."""
        return self._ask("rev-parse", "HEAD")

    def explain_gaps(self) -> str | None:
        """Return what is missing of the history, if something is."""
        if self.find_commit() is None:
            return "there is no git history here"
        shallow = self._ask("rev-parse", "--is-shallow-repository") == "true"
        return "this clone is shallow" if shallow else None

    def count_unrecorded(self) -> int:
        """Count the landings since the ledger was last committed, by the number of commits; 0 where git cannot say."""
        last = self._ask("log", "-1", "--format=%H", "--", FILE)
        if not last:
            return 0
        return int(self._ask("rev-list", "--count", f"{last}..HEAD") or 0) // COMMITS

    def list_changed(self, paths: Collection[str], commit: str | None = None) -> list[str] | None:
        """List which of these files differ from a commit, by itself the last one; None where git cannot say."""
        tracked = self._ask("diff", "--name-only", "--no-renames", commit or "HEAD", "--")
        new = self._ask("ls-files", "--others", "--exclude-standard")
        if tracked is None or new is None:
            return None
        return sorted({*tracked.splitlines(), *new.splitlines()} & {*paths})

    def _ask(self, *words: str) -> str | None:
        """Return what a command of git prints, or None if it fails or is not there."""
        try:
            done = subprocess.run(["git", *words], cwd=self._root, capture_output=True, text=True, check=False)
        except OSError:
            return None
        return None if done.returncode else done.stdout.strip()
