"""Where servers of one run live: with a /dev/shm and a temporary folder of their own, so that what is left is theirs.

Needs root: it is a mount namespace. A process keeps it, which ends the servers if the run itself is killed.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from getpass import getuser
from pathlib import Path
from types import TracebackType

from tests.support.page import ROOT

DISK_MIB = 64
COMPILED = f"torchinductor_{getuser()}"


class Sandbox:
    """A mount namespace for the length of a `with` block; at its end all of its processes are ended.

    Args:
        folder: an empty folder, with a short path: sockets are made below it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.temporary = folder.resolve() / "tmp"  # as it is in lists of mounts

    def __enter__(self) -> Sandbox:
        self.temporary.mkdir()
        ready = self.folder / "ready"
        disk = shlex.quote(str(self.temporary))
        mounts = f"mount -t tmpfs none /dev/shm && mount -t tmpfs -o size={DISK_MIB}m none {disk}"
        guard = shlex.join([sys.executable, "-m", "tests.support.reliability.sandbox", str(self.temporary)])
        script = f"{mounts} && touch {shlex.quote(str(ready))} && exec {guard}"
        self._holder = subprocess.Popen(
            ["unshare", "--mount", "sh", "-c", script], stdin=subprocess.PIPE, cwd=ROOT, start_new_session=True
        )
        while not ready.exists():
            assert self._holder.poll() is None, "a mount namespace cannot be made: faults need root"
            time.sleep(0.02)
        self._share_compiled()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._holder.communicate()  # it sees the end of its input, and ends all

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables of everything that runs here."""
        return {"TMPDIR": str(self.temporary)}

    def enter(self, *words: str) -> list[str]:
        """Return *words* as a command that runs here."""
        return ["nsenter", "--target", str(self._holder.pid), "--mount", "--", *words]

    def list_files(self) -> list[str]:
        """Return what is in /dev/shm and in the temporary folder."""
        shared = [f"/dev/shm/{name}" for name in os.listdir(self._see(Path("/dev/shm")))]
        own = [f"$TMPDIR/{name}" for name in os.listdir(self._see(self.temporary)) if name != COMPILED]
        return sorted(shared + own)

    def find_temporary(self, pattern: str) -> list[Path]:
        """Return what is in the temporary folder by a pattern of names, as seen from outside."""
        return sorted(self._see(self.temporary).glob(pattern))

    def fill_disk(self) -> None:
        """Take the last block of the temporary folder."""
        with suppress(OSError), (self._see(self.temporary) / "filler").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))

    def fill_disk_when_used(self) -> None:
        """Fill the disk once, when a server has a file there: with a full one, Python would choose another folder."""
        if self.find_temporary("[!tf]*") and not self.find_temporary("filler"):
            self.fill_disk()

    def empty(self) -> None:
        """Remove what servers left, so that it is not taken for the next one's."""
        for place in (Path("/dev/shm"), self.temporary):
            subprocess.run(["find", str(self._see(place)) + "/", "-mindepth", "1", "-delete"], check=True)
        self._share_compiled()

    def find_processes(self) -> dict[int, str]:
        """Return the names of the processes that run here, by id."""
        return find_processes(self.temporary, self._holder.pid)

    def end_all(self) -> None:
        """Kill all processes that run here, which are not asked before."""
        end_processes(self.temporary, self._holder.pid)

    def _share_compiled(self) -> None:
        """Share what torch has compiled with other runs: it keeps that in its temporary folder."""
        shared = Path(tempfile.gettempdir(), COMPILED)
        shared.mkdir(exist_ok=True)
        (self._see(self.temporary) / COMPILED).symlink_to(shared)

    def _see(self, path: Path) -> Path:
        """Return a path of the sandbox as seen from outside."""
        return Path(f"/proc/{self._holder.pid}/root{path}")


def find_processes(temporary: Path, holder: int) -> dict[int, str]:
    """Return the names of the processes that see the temporary folder of a sandbox as a disk, by id.

    So does the one that keeps the sandbox, *holder*, which is left out. Neither a changed title, which takes the place
    of the environment, nor another parent hides a process, and a network namespace entered on top of the sandbox has
    its mounts, too.
    """
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            mounts = (process / "mountinfo").read_text()
            if f" {temporary} " in mounts and int(process.name) != holder:
                found[int(process.name)] = (process / "comm").read_text().strip()
    return found


def end_processes(temporary: Path, holder: int) -> None:
    """Kill these processes, which are not asked before."""
    while left := find_processes(temporary, holder):
        for process in left:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.05)


def main() -> None:
    """Keep the namespace until the run closes the input of this process, or is killed; then end what runs in it."""
    sys.stdin.read()
    end_processes(Path(sys.argv[1]), os.getpid())


if __name__ == "__main__":
    main()
