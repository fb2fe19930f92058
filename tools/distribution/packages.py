"""The source package and the wheel: built of an exported commit, and tried out in empty environments."""

from __future__ import annotations

import sys
import tempfile
import venv
from pathlib import Path

from .checkout import export
from .commands import DistError, ask_git, run
from .links import write_links

TRIAL = ("plan", "--costs", "r1-tp16-941", "--tokens", "8192")
EXPECTED = "costs: r1-tp16-941, modelled"


def make_packages(root: Path, folder: Path, address: str | None) -> list[Path]:
    """Build the source package and the wheel of the last commit into *folder*, and let twine check them.

    Args:
        root: the checkout.
        folder: output folder of the packages.
        address: web address of the project, for absolute links; None leaves them relative.
    """
    folder.mkdir(parents=True, exist_ok=True)
    old = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    with tempfile.TemporaryDirectory() as exported:
        export(root, Path(exported))
        if address is not None:
            write_links(Path(exported), address, ask_git(root, "rev-parse", "HEAD"))
        run([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), exported])
    built = sorted(path for path in folder.iterdir() if old.get(path) != path.stat().st_mtime_ns)
    kinds = sorted(path.name.rpartition(".")[2] for path in built)
    if kinds != ["gz", "whl"]:
        raise DistError(f"a source package and a wheel should have been built, not {[path.name for path in built]}")
    run([sys.executable, "-m", "twine", "check", "--strict", *map(str, built)])
    return built


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
