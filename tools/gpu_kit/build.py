"""Build the GPU kit: `make gpu-kit`, or `python3 -m tools.gpu_kit.build`.

The kit is the folder `.gpu_kit`: `site.tar.xz` with the official vLLM for CUDA, its libraries cut to one GPU's code,
and the packages of `pins.txt`; the entry points of this project, whose code travels as the working tree, and of the
kit's own plugin; and `contents.json`, which says what is inside. Wheels are kept in `.gpu_kit_cache` for the next time,
and a kit that is up to date is left as it is. It needs CPython 3.10 or newer with pip, git, and a package index.
"""

from __future__ import annotations

import argparse
import datetime
import errno
import hashlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .archive import ARCHITECTURE, LEFT_OUT, pack
from .wheels import PYTHON, KitError, get_wheels, read_pins, split_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    from pip._vendor import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
PINS = Path(__file__).with_name("pins.txt")
LIMIT_BYTES = 64 << 20  # of what travels: the working tree and the kit
SITE, CONTENTS = "site.tar.xz", "contents.json"
SOURCES = ("archive", "slim", "wheels")  # modules that decide about the archive
PLUGIN = {"vllm.general_plugins": {"gpu_kit": "tools.gpu_kit.plugin:register"}}


def main() -> int:
    """Build the kit unless it is up to date, and say how large it is."""
    parser = argparse.ArgumentParser(description="Build the GPU kit.")
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / ".gpu_kit", help="where it goes (.gpu_kit)")
    parser.add_argument("--cache", type=Path, default=ROOT / ".gpu_kit_cache", help="of wheels (.gpu_kit_cache)")
    arguments = parser.parse_args()
    try:
        contents = build(arguments.folder.absolute(), arguments.cache.absolute())
        print(describe(contents, measure_tree(ROOT), measure(arguments.folder)))
    except KitError as error:
        print(f"gpu-kit: {error}", file=sys.stderr)
        return 1
    return 0


def build(folder: Path, cache: Path) -> dict[str, Any]:
    """Build the kit into *folder*, unless it is there, and return its contents.

    Raises:
        KitError: if it cannot be built, or is too large to travel. The folder is then as it was.
    """
    check_folder(folder)
    digest, distributions = digest_sources(), read_distributions()
    contents = read_contents(folder)
    try:
        if contents.get("digest") != digest:
            new = cache / "new"
            shutil.rmtree(new, ignore_errors=True)
            new.mkdir(parents=True)
            contents = {**make_archive(new, cache), "digest": digest, "distributions": distributions}
            complete(new, contents)
            check_size(measure_tree(ROOT), measure(new))
            shutil.rmtree(folder, ignore_errors=True)
            shutil.move(new, folder)
        elif contents["distributions"] != distributions:
            contents["distributions"] = distributions
            complete(folder, contents)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise KitError(f"the disk of {cache} or {folder} is full: free 1 GB, or name others") from None
        raise KitError(f"{error.filename or folder}: {error.strerror or error}") from error
    check_size(measure_tree(ROOT), measure(folder))
    return contents


def check_folder(folder: Path) -> None:
    """Refuse a folder with something else than a kit, which would be removed."""
    if folder.exists() and not any((folder / name).is_file() for name in (CONTENTS, SITE)) and any(folder.iterdir()):
        raise KitError(f"{folder} is no kit and not empty: name another folder")


def digest_sources() -> str:
    """Name all that decides about the archive, so that it is made anew when that changes."""
    sources = [PINS, *(Path(__file__).with_name(f"{name}.py") for name in SOURCES)]
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in sources)).hexdigest()


def read_distributions() -> dict[str, Any]:
    """Return the distributions whose code is not in the archive: their entry points, by name and version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    points = {**project["entry-points"], "console_scripts": project["scripts"]}
    return {f"{project['name'].replace('-', '_')}-{project['version']}": points, "gpu_kit-0": PLUGIN}


def read_contents(folder: Path) -> dict[str, Any]:
    """Return what a kit says that is inside; nothing if it is not complete."""
    try:
        contents: dict[str, Any] = json.loads((folder / CONTENTS).read_text(encoding="utf-8"))
        is_whole = (folder / SITE).stat().st_size == contents["bytes"]["site_packed"] and "distributions" in contents
        return contents if is_whole else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def make_archive(folder: Path, cache: Path) -> dict[str, Any]:
    """Make the archive, and return what is in it."""
    began = time.monotonic()
    wheels = get_wheels(read_pins(PINS), cache / "wheels")
    packed = pack(wheels, folder / SITE)
    return {
        "built": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "seconds": round(time.monotonic() - began, 1),
        "python": PYTHON,
        "architecture": ARCHITECTURE,
        "packages": dict(map(split_name, wheels)),
        "left_out": list(LEFT_OUT),
        "bytes": {
            "wheels": sum(wheel.stat().st_size for wheel in wheels),
            "site_raw": packed.raw_bytes,
            "site_packed": (folder / SITE).stat().st_size,
        },
        "libraries": packed.libraries,
    }


def complete(folder: Path, contents: Mapping[str, Any]) -> None:
    """Write all files of a kit but the archive; last the one that says that it is complete."""
    for old in (*folder.glob("*.dist-info"), folder / CONTENTS):
        shutil.rmtree(old) if old.is_dir() else old.unlink(missing_ok=True)
    for distribution, points in contents["distributions"].items():
        write_distribution(folder, distribution, points)
    (folder / CONTENTS).write_text(json.dumps(contents, indent=1) + "\n", encoding="utf-8")


def write_distribution(folder: Path, distribution: str, points: Mapping[str, Mapping[str, str]]) -> None:
    """Write what Python looks up about an installed distribution: its version, and its entry points by group."""
    own = folder / f"{distribution}.dist-info"
    own.mkdir()
    name, _, version = distribution.partition("-")
    (own / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")
    groups = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items())
        for group, entries in points.items()
    ]
    (own / "entry_points.txt").write_text("\n".join(groups), encoding="utf-8")


def measure(folder: Path) -> int:
    """Return the bytes of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def measure_tree(root: Path) -> int:
    """Return the bytes of the working tree: of the files that git knows, and of those that it does not ignore."""
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        names = subprocess.run(command, capture_output=True, check=True).stdout.decode().split("\0")
    except (OSError, subprocess.CalledProcessError):
        raise KitError(
            f"git does not list the files of {root}: build the kit in a checkout, with git installed"
        ) from None
    return sum((root / name).stat().st_size for name in names if name and (root / name).is_file())


def check_size(tree_bytes: int, kit_bytes: int) -> None:
    """Refuse a kit that is too large to travel with the working tree."""
    if tree_bytes + kit_bytes > LIMIT_BYTES:
        raise KitError(
            f"{show(kit_bytes)} of the kit and {show(tree_bytes)} of the working tree are more than "
            f"{show(LIMIT_BYTES)}: take packages out of tools/gpu_kit/pins.txt, or files out of the tree"
        )


def describe(contents: Mapping[str, Any], tree_bytes: int, kit_bytes: int) -> str:
    """Return how large the kit is, in a line."""
    return (
        f"gpu-kit: {show(kit_bytes)} and {show(tree_bytes)} of the working tree, of {show(LIMIT_BYTES)}; "
        f"built on {contents['built']} in {contents['seconds'] / 60:.1f} minutes"
    )


def show(size: int) -> str:
    """Return a size as people read it."""
    return f"{size / (1 << 20):.1f} MiB"


if __name__ == "__main__":
    sys.exit(main())
