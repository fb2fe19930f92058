"""Python environments of the tests' own: real folders, real processes, and in them only what a test puts there."""

from __future__ import annotations

import json
import subprocess
import venv
from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import dbo_runtime

ROOT = Path(dbo_runtime.__file__).parents[1]
CORE = ("numpy", "numpy.libs", "structlog", "typing_extensions.py")


class Surroundings:
    """An environment with dbo_runtime and what its core needs.

    Args:
        folder: where to make it.
    """

    def __init__(self, folder: Path) -> None:
        venv.create(folder, symlinks=True, with_pip=False)
        self.home = folder
        self.variables = {"HOME": str(folder), "PATH": "/usr/bin:/bin"}
        (self._packages,) = folder.glob("lib/python*/site-packages")
        numpy = find_spec("numpy")
        assert numpy is not None
        assert numpy.origin is not None
        for name in CORE:
            source = Path(numpy.origin).parents[1] / name
            if source.exists():
                (self._packages / name).symlink_to(source)
        (self._packages / "dbo_runtime").symlink_to(ROOT / "dbo_runtime")
        (self._packages / "dbo_models").symlink_to(ROOT / "models")
        own = distribution("dbo-runtime")
        self.describe("dbo_runtime", own.version, own.read_text("entry_points.txt") or "")

    def describe(self, name: str, version: str, entry_points: str = "") -> Path:
        """Register a package as pip does, without its code; return the folder of its metadata."""
        folder = self._packages / f"{name}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (folder / "entry_points.txt").write_text(entry_points)
        return folder

    def add(self, name: str, version: str, code: str = "", **modules: str) -> None:
        """Install a package that consists of these lines, and of submodules."""
        self.describe(name, version)
        package = self._packages / name
        package.mkdir()
        for stem, text in {"__init__": code, **modules}.items():
            (package / f"{stem}.py").write_text(text)

    def add_torch(self, version: str = "2.13.0") -> None:
        """Install what `probe` asks of torch: a version, and no GPU."""
        cuda = "def is_available():\n    return False\n"
        self.add("torch", version, f"__version__ = {version!r}\nfrom torch import cuda", cuda=cuda)

    def add_vllm(self, platform: str = "cpu", version: str = "0.30.0") -> None:
        """Install what `probe` asks of vLLM: a version, and the platform that it serves on."""
        platforms = f"class current_platform:\n    device_type = {platform!r}\n"
        self.add("vllm", version, f"__version__ = {version!r}", platforms=platforms)

    def run(self, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run doctor in it."""
        return subprocess.run(
            [str(self.home / "bin" / "python"), "-m", "dbo_runtime", "doctor", *words],
            env={**self.variables, **variables},
            cwd=self.home,
            capture_output=True,
            text=True,
            check=False,
        )

    def examine(self, *words: str, **variables: str) -> dict[str, Any]:
        """Run doctor in it, and return its findings by name; `status` is its exit status."""
        done = self.run(*words, "--json", **variables)
        assert done.stderr == ""
        report = json.loads(done.stdout)
        assert report["ok"] == (done.returncode == 0)
        return {"status": done.returncode, **{finding["name"]: finding for finding in report["findings"]}}
