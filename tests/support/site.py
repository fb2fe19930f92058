"""The documentation site, built as `make site` builds it, and looked at in a browser without a window."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("chromium", "chromium-browser", "google-chrome")
SWITCHES = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
SCHEMES = {"dark": "--blink-settings=preferredColorScheme=0", "light": "--blink-settings=preferredColorScheme=1"}


def build_site(folder: Path) -> None:
    """Build the site into a folder; a warning of mkdocs is an error."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(ROOT / "mkdocs.yml")]
    done = subprocess.run([*command, "--site-dir", str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def find_browser() -> str | None:
    """Return the path of a Chromium, or None."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


@dataclass(frozen=True)
class Browser:
    """A Chromium that opens one page at a time, each in a new profile: the site remembers a scheme.

    Attributes:
        program: its path.
        folder: folder of the profiles.
    """

    program: str
    folder: Path

    def read(self, address: str, scheme: str, milliseconds: int = 120_000) -> str:
        """Return a page's document after so much of the page's own time; its scripts have run by then."""
        return self._run(scheme, f"--virtual-time-budget={milliseconds}", "--dump-dom", address).stdout

    def shoot(self, address: str, scheme: str, size: tuple[int, int], file: Path) -> None:
        """Write a picture of a page."""
        window = f"--window-size={size[0]},{size[1]}"
        self._run(scheme, "--virtual-time-budget=5000", window, f"--screenshot={file}", address)

    def _run(self, scheme: str, *words: str) -> subprocess.CompletedProcess[str]:
        with TemporaryDirectory(dir=self.folder) as profile:
            command = [self.program, *SWITCHES, SCHEMES[scheme], f"--user-data-dir={profile}", *words]
            return subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)


class _Silent(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@contextmanager
def serve_folder(folder: Path) -> Iterator[str]:
    """Serve a folder on this machine, and give the address of its root."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Silent, directory=str(folder))) as server:
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/"
        finally:
            server.shutdown()
            thread.join()
