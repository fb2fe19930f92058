"""The checkout that packages are made of: its last commit, its version, and its address on the web."""

from __future__ import annotations

import os
import re
import tarfile
from pathlib import Path

from .commands import DistError, ask_git
from .links import find_address


def export(root: Path, folder: Path) -> None:
    """Write the files of the last commit into *folder*."""
    archive = folder / "commit.tar"
    ask_git(root, "archive", "--output", str(archive), "HEAD")
    with tarfile.open(archive) as files:
        files.extractall(folder, filter="data")
    archive.unlink()


def check_release(root: Path) -> None:
    """Refuse a checkout whose last commit is no release.

    Raises:
        DistError: if files differ from the commit, it lacks the version's tag, or the version has no dated heading.
    """
    version = read_version(root)
    if ask_git(root, "status", "--porcelain"):
        raise DistError("the checkout differs from the last commit: commit or remove what `git status` lists")
    if f"v{version}" not in ask_git(root, "tag", "--points-at", "HEAD").split():
        raise DistError(f"the last commit has no tag v{version}: `git tag v{version}`, or correct pyproject.toml")
    if not re.search(
        rf"^## {re.escape(version)} \(\d{{4}}-\d\d-\d\d\)$", (root / "CHANGELOG.md").read_text(), re.MULTILINE
    ):
        raise DistError(f"CHANGELOG.md has no heading `## {version} (YEAR-MONTH-DAY)`")


def read_address(root: Path) -> str | None:
    """Return the project's address on the web; see `find_address`."""
    has_origin = "origin" in ask_git(root, "remote").split()
    try:
        return find_address(os.environ, ask_git(root, "remote", "get-url", "origin") if has_origin else "")
    except ValueError as error:
        raise DistError(str(error)) from None


def read_version(root: Path) -> str:
    """Return the version in `pyproject.toml`, the one place where it is kept."""
    found = re.search(r'^version = "([^"]+)"$', (root / "pyproject.toml").read_text(), re.MULTILINE)
    if found is None:
        raise DistError("pyproject.toml has no version")
    return found[1]
