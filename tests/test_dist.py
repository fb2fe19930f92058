"""Packages that are built from the last commit, checked by twine, and installed into empty environments."""

from __future__ import annotations

import subprocess
import tarfile
from pathlib import Path

import pytest

from tools.make_dist import DistError, check_release, make_packages, read_version, try_out

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_both_packages_install_into_an_empty_environment_and_plan(tmp_path: Path) -> None:
    packages = make_packages(ROOT, tmp_path)
    wheel, source = packages
    version = read_version(ROOT)
    assert (source.name, wheel.name) == (f"dbo_runtime-{version}.tar.gz", f"dbo_runtime-{version}-py3-none-any.whl")
    with tarfile.open(source) as files:
        names = files.getnames()
    assert f"dbo_runtime-{version}/models/deepseek.py" in names
    assert not any("/.venv/" in name or "__pycache__" in name for name in names)
    for package in packages:
        try_out(package)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a checkout of one commit, which is a release."""
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "1.2.0"\n')
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## 1.2.0 (2026-01-31)\n")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "-c", "user.name=A", "-c", "user.email=a@example.org", "commit", "--quiet", "--message=One")
    git(tmp_path, "tag", "v1.2.0")
    return tmp_path


def git(folder: Path, *words: str) -> None:
    subprocess.run(["git", "-C", str(folder), *words], check=True, capture_output=True)


def test_a_tagged_and_dated_commit_is_a_release(checkout: Path) -> None:
    check_release(checkout)


def test_a_checkout_with_changes_is_no_release(checkout: Path) -> None:
    (checkout / "new.py").write_text("")
    with pytest.raises(DistError, match="differs from the last commit"):
        check_release(checkout)


def test_a_commit_without_the_tag_of_its_version_is_no_release(checkout: Path) -> None:
    git(checkout, "tag", "--delete", "v1.2.0")
    git(checkout, "tag", "v1.1.0")
    with pytest.raises(DistError, match=r"no tag v1\.2\.0"):
        check_release(checkout)


def test_a_version_without_a_date_in_the_changelog_is_no_release(checkout: Path) -> None:
    (checkout / "CHANGELOG.md").write_text("# Changelog\n\n## 1.2.0 (not released yet)\n")
    git(checkout, "-c", "user.name=A", "-c", "user.email=a@example.org", "commit", "--quiet", "--all", "--message=Two")
    git(checkout, "tag", "--force", "v1.2.0")
    with pytest.raises(DistError, match="no heading"):
        check_release(checkout)


def test_the_changelog_has_a_heading_for_the_version() -> None:
    assert f"\n## {read_version(ROOT)} (" in (ROOT / "CHANGELOG.md").read_text()
