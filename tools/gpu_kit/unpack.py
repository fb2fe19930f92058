"""Unpack the GPU kit where it is to be used: `python3 -m tools.gpu_kit.unpack FOLDER`.

It prints what PYTHONPATH needs: the folder, and the checkout, because this project runs from the working tree. The
tree's folder `models`, which is imported as `dbo_models`, is linked. A folder that has this kit is left as it is.
"""

from __future__ import annotations

import argparse
import lzma
import shutil
import sys
import tarfile
import time
from pathlib import Path

from .build import CONTENTS, ROOT, SITE
from .wheels import KitError


def main() -> int:
    """Unpack into a folder, and print what PYTHONPATH needs."""
    parser = argparse.ArgumentParser(description="Unpack the GPU kit, and print what PYTHONPATH needs.")
    parser.add_argument("folder", type=Path, help="is made, or made anew")
    parser.add_argument("--kit", type=Path, default=ROOT / ".gpu_kit", help="its folder (.gpu_kit)")
    arguments = parser.parse_args()
    folder = arguments.folder.absolute()
    began = time.monotonic()
    try:
        if unpack(arguments.kit.absolute(), folder):
            print(f"gpu_kit: unpacked in {time.monotonic() - began:.0f} s", file=sys.stderr)
    except KitError as error:
        print(f"gpu_kit: {error}", file=sys.stderr)
        return 1
    print(f"{folder}:{ROOT}")
    return 0


def unpack(kit: Path, folder: Path) -> bool:
    """Unpack a kit into a folder that is made, or made anew; return whether that was necessary.

    Raises:
        KitError: if there is no kit, or it is damaged.
    """
    if not (kit / CONTENTS).is_file():
        raise KitError(f"{kit} is no kit: `make gpu-kit` builds one, where there is a package index")
    contents, kept = (kit / CONTENTS).read_bytes(), folder / CONTENTS
    if kept.is_file() and kept.read_bytes() == contents:
        return False
    if folder.exists() and any(folder.iterdir()) and not kept.is_file():
        raise KitError(f"{folder} has no kit and is not empty: name another folder")
    new = folder.with_name(f"{folder.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    try:
        with tarfile.open(kit / SITE, "r:xz") as archive:
            archive.extractall(new, filter="data")
    except (OSError, EOFError, lzma.LZMAError, tarfile.TarError) as error:
        raise KitError(f"{kit / SITE} cannot be unpacked into {new}: {error}") from error
    (new / "dbo_models").symlink_to(ROOT / "models")
    for distribution in kit.glob("*.dist-info"):
        shutil.copytree(distribution, new / distribution.name)
    (new / CONTENTS).write_bytes(contents)
    shutil.rmtree(folder, ignore_errors=True)
    new.rename(folder)
    return True


if __name__ == "__main__":
    sys.exit(main())
