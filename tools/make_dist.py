"""Build the packages of the last commit, check them and try them out (`make dist`); `--release` is all but the upload.

The commit is exported into an empty folder, so nothing that lies about in the checkout gets into a package. The source
package is built from it, and the wheel from that. twine checks both, strictly. Each is then installed into an empty
environment, whose `dbo` plans a published case. The version is kept in `pyproject.toml`; a release needs a clean
checkout, a tag `v` with that version on the commit, and a dated heading in `CHANGELOG.md`.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TRIAL = ("plan", "--costs", "r1-tp16-941", "--tokens", "8192")
EXPECTED = "costs: r1-tp16-941, modelled"


class DistError(Exception):
    """The packages are not fit to be published; the message is one line that says why."""


def main() -> int:
    """Build into a folder, and say what was built."""
    parser = argparse.ArgumentParser(description="Build, check and try out the packages of the last commit.")
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / "dist", help="where they go (dist)")
    parser.add_argument("--release", action="store_true", help="refuse what is not tagged and dated, too")
    arguments = parser.parse_args()
    try:
        if arguments.release:
            check_release(ROOT)
        packages = make_packages(ROOT, arguments.folder)
        for package in packages:
            try_out(package)
    except DistError as error:
        print(f"make_dist: {error}", file=sys.stderr)
        return 1
    print("\n".join(f"built, checked and tried out: {package}" for package in packages))
    if arguments.release:
        print(f"to publish: {sys.executable} -m twine upload {' '.join(map(str, packages))}")
    return 0


def make_packages(root: Path, folder: Path) -> list[Path]:
    """Build the source package and the wheel of the last commit into *folder*, and let twine check them."""
    folder.mkdir(parents=True, exist_ok=True)
    old = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    with tempfile.TemporaryDirectory() as exported:
        export(root, Path(exported))
        run([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), exported])
    built = sorted(path for path in folder.iterdir() if old.get(path) != path.stat().st_mtime_ns)
    kinds = sorted(path.name.rpartition(".")[2] for path in built)
    if kinds != ["gz", "whl"]:
        raise DistError(f"a source package and a wheel should have been built, not {[path.name for path in built]}")
    run([sys.executable, "-m", "twine", "check", "--strict", *map(str, built)])
    return built


def export(root: Path, folder: Path) -> None:
    """Write the files of the last commit into *folder*."""
    archive = folder / "commit.tar"
    run(["git", "-C", str(root), "archive", "--output", str(archive), "HEAD"])
    with tarfile.open(archive) as files:
        files.extractall(folder, filter="data")
    archive.unlink()


def try_out(package: Path) -> None:
    """Install a package into an empty environment, and run its command in an empty folder."""
    with tempfile.TemporaryDirectory() as home:
        environment = Path(home) / "environment"
        venv.create(environment, symlinks=True)  # without pip, and pip does not compile: each takes seconds
        python = environment / "bin" / "python"
        run([sys.executable, "-m", "pip", "--python", str(python), "install", "--no-compile", "--quiet", str(package)])
        said = run([str(environment / "bin" / "dbo"), *TRIAL], Path(home))
    if EXPECTED not in said:
        raise DistError(f"{package.name}: `dbo {' '.join(TRIAL)}` does not print {EXPECTED!r}, but {said!r:.200}")


def check_release(root: Path) -> None:
    """Refuse a checkout whose last commit is no release.

    Raises:
        DistError: if files differ from the commit, it lacks the version's tag, or the version has no dated heading.
    """
    version = read_version(root)
    if run(["git", "-C", str(root), "status", "--porcelain"]):
        raise DistError("the checkout differs from the last commit: commit or remove what `git status` lists")
    if f"v{version}" not in run(["git", "-C", str(root), "tag", "--points-at", "HEAD"]).split():
        raise DistError(f"the last commit has no tag v{version}: `git tag v{version}`, or correct pyproject.toml")
    if not re.search(
        rf"^## {re.escape(version)} \(\d{{4}}-\d\d-\d\d\)$", (root / "CHANGELOG.md").read_text(), re.MULTILINE
    ):
        raise DistError(f"CHANGELOG.md has no heading `## {version} (YEAR-MONTH-DAY)`")


def read_version(root: Path) -> str:
    """Return the version in `pyproject.toml`, the one place where it is kept."""
    found = re.search(r'^version = "([^"]+)"$', (root / "pyproject.toml").read_text(), re.MULTILINE)
    if found is None:
        raise DistError("pyproject.toml has no version")
    return found[1]


def run(command: Sequence[str], folder: Path | None = None) -> str:
    """Run a command without the checkout on Python's path, and return what it prints.

    Raises:
        DistError: if it fails.
    """
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)
    if done.returncode:
        raise DistError(f"`{' '.join(command)}` failed:\n{done.stdout[-1000:]}{done.stderr[-2000:]}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
