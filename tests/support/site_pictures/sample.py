"""A page that stays the same, in the site's look: what else is on the site changes with each sentence."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.support.site import ROOT

PAGES = Path(__file__).with_name("sample")
# All is as in mkdocs.yml but for what names pages. The navigation has as many levels as that of the site.
SETTINGS = {
    "INHERIT": str(ROOT / "mkdocs.yml"),
    "docs_dir": "docs",
    "hooks": [],
    "nav": [
        {"Overview": "other.md"},
        {"Start": [{"A page": "index.md"}, {"Below": [{"Another page": "other.md"}]}]},
        {"Serve": [{"The same": "other.md"}]},
    ],
}


def build_sample(folder: Path) -> None:
    """Build the page with the settings and the style sheets of the site into a folder."""
    with TemporaryDirectory() as name:
        place = Path(name)
        docs = place / "docs"
        docs.mkdir()
        for file in PAGES.iterdir():
            (docs / file.name).symlink_to(file)
        for style in (ROOT / "docs").glob("*.css"):
            (docs / style.name).symlink_to(style)
        settings = place / "mkdocs.yml"
        settings.write_text(json.dumps(SETTINGS))  # which is YAML, too
        command = [sys.executable, "-m", "mkdocs", "build", "--config-file", str(settings), "--site-dir", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
