"""A real file system of a few blocks, which only the processes of one command see. Needs root, or user namespaces."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

FILL = "dd if=/dev/zero of={}/filler bs=4096 status=none 2>/dev/null"


def wrap_command(words: Sequence[str], folder: Path, kibibytes: int = 64, is_full: bool = True) -> list[str]:
    """Return a command that runs *words* where *folder* is a disk of so many KiB, in use up to the last block."""
    fill = FILL.format(shlex.quote(str(folder))) if is_full else "true"
    mount = f"mount -t tmpfs -o size={kibibytes}k none {shlex.quote(str(folder))}"
    return [*_UNSHARE, "sh", "-c", f"{mount} || exit 97; {fill}; exec {shlex.join(words)}"]


def can_mount() -> bool:
    """Return whether disks can be made here."""
    if shutil.which("unshare") is None:
        return False
    done = subprocess.run([*_UNSHARE, "sh", "-c", "mount -t tmpfs none /mnt"], capture_output=True)
    return done.returncode == 0


_UNSHARE = ("unshare", "--mount") if os.geteuid() == 0 else ("unshare", "--mount", "--map-root-user")
