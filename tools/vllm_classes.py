"""Get the Python classes of a version of vLLM, without compiled code: `make record-adapters VLLM=0.33.0`.

Prints the folder to put on PYTHONPATH: vLLM's source package, unpacked below `build/compat`, used with the packages of
the environment that runs this. That is enough to make models and let adapters record, but not to serve.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

FOLDER = Path(__file__).resolve().parents[1] / "build" / "compat"
BUILD_TOOLS = (
    "setuptools>=77,<81",
    "setuptools-scm",
    "setuptools-rust",
    "semantic-version",
)  # vLLM's metadata needs them
VERSION = """__version__ = version = {0!r}
__version_tuple__ = version_tuple = tuple(map(int, version.split(".")))
"""
FURTHER: Mapping[str, tuple[str, ...]] = MappingProxyType({"0.23.0": ("gguf",)})
"""Packages that a version imports and the pinned one does not."""


def main() -> int:
    """Get the classes of a version, unless they are there."""
    parser = argparse.ArgumentParser(description="Get the Python classes of a version of vLLM.")
    parser.add_argument("version", help="such as 0.33.0")
    version: str = parser.parse_args().version
    folder = FOLDER / version
    if not (folder / "vllm" / "_version.py").is_file():
        get_classes(version, folder)
    print(folder)
    return 0


def get_classes(version: str, folder: Path) -> None:
    """Unpack vLLM's source package into *folder*, with a version that it would have after a build."""
    tools = FOLDER / "tools"
    pip("install", "--quiet", "--upgrade", "--target", str(tools), *BUILD_TOOLS)
    build = {"VLLM_TARGET_DEVICE": "empty", "CARGO": "false", "VLLM_VERSION_OVERRIDE": version}
    build |= {"PYTHONPATH": str(tools), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--no-binary", "vllm", "--dest", str(FOLDER))
    pip("download", *options, f"vllm=={version}", environment=build)
    with tarfile.open(FOLDER / f"vllm-{version}.tar.gz") as archive:
        for member in archive.getmembers():
            top, _, name = member.name.partition("/")
            if top == f"vllm-{version}" and name.startswith("vllm/"):
                member.name = name
                archive.extract(member, folder, filter="data")
    if version in FURTHER:
        pip("install", "--quiet", "--no-deps", "--target", str(folder), *FURTHER[version])
    (folder / "vllm" / "_version.py").write_text(VERSION.format(version))


def pip(*arguments: str, environment: Mapping[str, str] = MappingProxyType({})) -> None:
    """Run pip of this environment; what it prints goes to standard error."""
    command: Sequence[str] = (sys.executable, "-m", "pip", *arguments)
    subprocess.run(command, env={**os.environ, **environment}, stdout=sys.stderr, check=True)


if __name__ == "__main__":
    sys.exit(main())
