"""Build the GPU kit: `make gpu-kit`, or `python3 -m tools.gpu_kit.build`.

The kit is the folder `.gpu_kit`: `site.tar.xz` with the official vLLM for CUDA, its libraries cut to one GPU's code, and
the packages of `pins.txt`; the entry points of this project, whose code travels as the working tree, and of the kit's
own plugin; and `contents.json`, which says what is inside. Wheels are kept in `.gpu_kit_cache` for the next time, and a
kit that is up to date is left as it is. It needs CPython 3.10 or newer with pip, git, and a package index.
"""

from __future__ import annotations

import argparse
import datetime
import errno
import hashlib
import io
import json
import lzma
import re
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .slim import SlimError, slim
from .wheels import PYTHON, KitError, get_wheels, read_files, read_pins, split_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    from pip._vendor import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
PINS = Path(__file__).with_name("pins.txt")
ARCHITECTURE = 90
LIMIT_BYTES = 64 << 20  # of what travels: the working tree and the kit
SITE, CONTENTS = "site.tar.xz", "contents.json"
SOURCES = ("build", "slim", "wheels")  # modules that decide about the kit
# Kernels resemble others that are far away: with the usual dictionary of 8 MiB the kit is larger by a tenth.
FILTERS = ({"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 64 << 20},)
PLUGIN = {"vllm.general_plugins": {"gpu_kit": "tools.gpu_kit.plugin:register"}}
LEFT_OUT = (  # of vLLM; what ends with a slash is a folder
    "vllm/_deepselect_C.abi3.so",  # for sm_100 alone, as are qutlass and fmha_sm100
    "vllm/_flashkda_C.abi3.so",  # for a kind of linear attention that is not measured
    "vllm/_qutlass_C.abi3.so",
    "vllm/_rust_tool_parser.abi3.so",  # of the server, as are vllm-rs and the pictures of its pages
    "vllm/entrypoints/serve/instrumentator/static/",
    "vllm/third_party/deep_gemm/",  # compiles kernels on the machine; for FP8, which is not measured
    "vllm/third_party/fmha_sm100/",
    "vllm/vllm-rs",
    "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so",  # has PTX for sm_90, but no cubin; vLLM takes FA3 there
)


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
    digest = digest_sources()
    contents = read_contents(folder)
    try:
        if contents.get("digest") != digest:
            new = cache / "new"
            shutil.rmtree(new, ignore_errors=True)
            new.mkdir(parents=True)
            contents = {**make_kit(new, cache), "digest": digest}
            (new / CONTENTS).write_text(json.dumps(contents, indent=1) + "\n", encoding="utf-8")
            check_size(measure_tree(ROOT), measure(new))
            shutil.rmtree(folder, ignore_errors=True)
            shutil.move(new, folder)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise KitError(f"the disk of {cache} or {folder} is full: free 1 GB, or name others") from None
        raise KitError(f"{error.filename or folder}: {error.strerror or error}") from error
    check_size(measure_tree(ROOT), measure(folder))
    return contents


def digest_sources() -> str:
    """Name all that decides about the kit, so that it is built anew when that changes."""
    sources = [PINS, ROOT / "pyproject.toml", *(Path(__file__).with_name(f"{name}.py") for name in SOURCES)]
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in sources)).hexdigest()


def read_contents(folder: Path) -> dict[str, Any]:
    """Return what a kit says that is inside; nothing if it is not complete."""
    try:
        contents: dict[str, Any] = json.loads((folder / CONTENTS).read_text(encoding="utf-8"))
        return contents if (folder / SITE).stat().st_size == contents["bytes"]["site_packed"] else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def make_kit(folder: Path, cache: Path) -> dict[str, Any]:
    """Make all files of the kit but that of its contents, which it returns."""
    began = time.monotonic()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wheels = get_wheels(read_pins(PINS), cache / "wheels")
    packed = pack(wheels, folder / SITE)
    points = {**project["entry-points"], "console_scripts": project["scripts"]}
    write_distribution(folder, project["name"], project["version"], points)
    write_distribution(folder, "gpu_kit", "0", PLUGIN)
    return {
        "built": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),  # noqa: UP017 - Python 3.10
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


class Packer:
    """Packs files into a compressed archive, which is the same each time; libraries are cut to the architecture."""

    def __init__(self, archive: tarfile.TarFile) -> None:
        self.libraries: dict[str, dict[str, int]] = {}
        self.raw_bytes = 0
        self._archive = archive

    def add(self, path: str, content: bytes) -> None:
        """Add a file."""
        if re.search(r"\.so(\.\d+)*$", path):
            content = self._slim(path, content)
        info = tarfile.TarInfo(path)
        info.size = len(content)
        info.mode = 0o644
        self._archive.addfile(info, io.BytesIO(content))
        self.raw_bytes += len(content)

    def _slim(self, path: str, content: bytes) -> bytes:
        try:
            slimmed = slim(content, ARCHITECTURE)
        except SlimError as error:
            raise KitError(f"{path}: {error}. If the kit can do without it, add it to LEFT_OUT in {__file__}") from None
        if slimmed.containers:
            self.libraries[path] = {
                "bytes": len(content),
                "code_bytes": slimmed.code_bytes,
                "containers": slimmed.containers,
                "without_code": slimmed.without_code,
            }
            print(f"gpu-kit: {path}: {slimmed.code_bytes / 1e6:.1f} of {len(content) / 1e6:.1f} MB kept", flush=True)
        return slimmed.content


def pack(wheels: Sequence[Path], file: Path) -> Packer:
    """Pack the files of wheels, but for those that are left out, and return what was packed."""
    with lzma.open(file, "wb", filters=FILTERS) as stream, tarfile.open(fileobj=stream, mode="w|") as archive:
        packer = Packer(archive)
        unused = set(LEFT_OUT)
        for wheel in wheels:
            for path, content in read_files(wheel):
                if rule := find_rule(path):
                    unused.discard(rule)
                else:
                    packer.add(path, content)
    if unused:
        raise KitError(f"no wheel has {sorted(unused)[0]} any more: take it out of LEFT_OUT in {__file__}")
    return packer


def find_rule(path: str) -> str | None:
    """Return what says that a file is left out, if anything does."""
    return next((rule for rule in LEFT_OUT if path == rule or rule.endswith("/") and path.startswith(rule)), None)


def write_distribution(folder: Path, name: str, version: str, points: Mapping[str, Mapping[str, str]]) -> None:
    """Write what Python looks up about an installed distribution: its version, and its entry points by group."""
    own = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    own.mkdir()
    (own / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")
    groups = (f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in own.items()) for group, own in points.items())
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
        raise KitError(f"git does not list the files of {root}: build the kit in a checkout, with git installed") from None
    return sum((root / name).stat().st_size for name in names if name and (root / name).is_file())


def check_size(tree_bytes: int, kit_bytes: int) -> None:
    """Refuse a kit that does not fit beside the working tree."""
    if tree_bytes + kit_bytes > LIMIT_BYTES:
        raise KitError(
            f"{show(kit_bytes)} of the kit and {show(tree_bytes)} of the working tree are more than {show(LIMIT_BYTES)}: "
            "take packages out of tools/gpu_kit/pins.txt, or files out of the tree"
        )


def describe(contents: Mapping[str, Any], tree_bytes: int, kit_bytes: int) -> str:
    """Return how large the kit is, in a line."""
    return (
        f"gpu-kit: {show(kit_bytes)}, beside {show(tree_bytes)} of the working tree, of {show(LIMIT_BYTES)}; "
        f"built on {contents['built']} in {contents['seconds'] / 60:.1f} minutes"
    )


def show(size: int) -> str:
    """Return a size as people read it."""
    return f"{size / (1 << 20):.1f} MiB"


if __name__ == "__main__":
    sys.exit(main())
