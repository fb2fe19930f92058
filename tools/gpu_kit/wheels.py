"""The wheels that the GPU kit is made of: got by pip, for the Python and system of the machine that has the GPU."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

PYTHON = "3.12"
# pip matches the tag of a platform exactly, and these are all that a system with glibc 2.39 takes.
PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in range(39, 4, -1)),
    *(f"manylinux{year}_x86_64" for year in (2014, 2010, 1)),
)
ABIS = (f"cp{PYTHON.replace('.', '')}", "abi3", "none")
INSTALLED = (["purelib"], ["platlib"])  # the parts of a wheel's folder `.data` that are imported


class KitError(Exception):
    """The kit cannot be made or used; the message is one line that says what to change."""


def read_pins(file: Path) -> dict[str, str]:
    """Return the distributions that a file of pins names, with their versions."""
    lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    pins = [line.split("==") for line in lines if line and not line.startswith("#")]
    if wrong := ["==".join(pin) for pin in pins if len(pin) != 2]:
        raise KitError(f"{file}: {wrong[0]!r} is no pin: write name==version")
    return {name: version.lstrip("=") for name, version in pins}


def get_wheels(pins: dict[str, str], folder: Path) -> list[Path]:
    """Return the wheel of each pin, in their order; those that the folder lacks are downloaded into it."""
    missing = [f"{name}=={version}" for name, version in pins.items() if not find_wheels(folder, name, version)]
    if missing:
        print(f"gpu-kit: gets {len(missing)} of {len(pins)} wheels", flush=True)
        download(missing, folder)
    found = {name: find_wheels(folder, name, version) for name, version in pins.items()}
    for name, wheels in found.items():
        if len(wheels) != 1:
            raise KitError(f"{folder} has {len(wheels)} wheels of {name} {pins[name]}, not one: delete that folder")
    return [wheels[0] for wheels in found.values()]


def find_wheels(folder: Path, name: str, version: str) -> list[Path]:
    """Return the wheels of this version of a distribution in a folder."""
    wanted = (normalize(name), version)
    return [wheel for wheel in sorted(folder.glob("*.whl")) if split_name(wheel) == wanted]


def split_name(wheel: Path) -> tuple[str, str]:
    """Return the distribution and the version of a wheel."""
    name, version, *_ = wheel.name.split("-")
    return normalize(name), version


def normalize(name: str) -> str:
    """Return a distribution's name as it is compared."""
    return re.sub(r"[-_.]+", "-", name).lower()


def download(pins: Sequence[str], folder: Path) -> None:
    """Download the wheels of pins into a folder.

    Raises:
        KitError: if pip finds none, or fails otherwise.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tags = [f"--platform={platform}" for platform in PLATFORMS] + [f"--abi={abi}" for abi in ABIS]
    tags += [f"--python-version={PYTHON}", "--implementation=cp"]
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", *tags]
    command += ["--no-cache-dir", "--disable-pip-version-check", "--dest", str(folder), *pins]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if not done.returncode:
        return
    errors = [line[7:] for line in done.stdout.splitlines() if line.startswith("ERROR: ")]
    if errors and errors[-1].startswith("No matching distribution found for "):
        raise KitError(
            f"pip finds no wheel of {errors[-1].split()[-1]} for CPython {PYTHON} on Linux, x86-64: see that it "
            "reaches its package index, or correct tools/gpu_kit/pins.txt"
        )
    raise KitError(f"pip download fails: {errors[-1] if errors else done.stdout[-500:].strip() or 'no reason given'}")


def read_files(wheel: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the files of a wheel, by the path that they have once they are installed."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            for info in archive.infolist():
                path = None if info.is_dir() else place(info.filename)
                if path is not None:
                    yield path, archive.read(info)
    except (zipfile.BadZipFile, EOFError) as error:
        raise KitError(f"{wheel} is damaged ({error}): delete it") from None


def place(path: str) -> str | None:
    """Return where a wheel's file is installed below site-packages, or None if it is not needed there."""
    first, *rest = PurePosixPath(path).parts
    if first.endswith(".data"):
        return "/".join(rest[1:]) if rest[:1] in INSTALLED else None  # others are scripts and headers
    # What RECORD says of the libraries is no longer so, and nothing that runs here reads it.
    return None if first.endswith(".dist-info") and rest == ["RECORD"] else path
