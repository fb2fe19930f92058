"""Compare how pages of the site look with the pictures that are stored, or store what they look like now.

    python -m tests.support.site_pictures [--write]

Look at the pictures before you commit them (tests/support/site_pictures/stored). It needs a Chromium.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.support.site import SCHEMES, Browser, find_browser, serve_folder
from tests.support.site_pictures.comparison import STORED, find_fault, store
from tests.support.site_pictures.views import VIEWS, build_pages, shoot


def main() -> int:
    """Store the pictures, or name those that differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="store the pictures")
    is_write: bool = parser.parse_args().write
    program = find_browser()
    if program is None:
        print("no Chromium here: apt-get install chromium", file=sys.stderr)
        return 1
    faults = []
    with TemporaryDirectory() as profiles, TemporaryDirectory() as name:
        browser, site = Browser(program, Path(profiles)), Path(name, "site")
        build_pages(site)
        with serve_folder(site) as address:
            for scheme in SCHEMES:
                views = [view for view in VIEWS if view.scheme == scheme]
                for view, picture in zip(views, shoot(views, site, address, browser), strict=True):
                    if is_write:
                        store(picture, view.name)
                    elif fault := find_fault(view, picture):
                        faults.append(fault)
    print(*(faults or [f"{len(VIEWS)} pictures are {'in' if is_write else 'as in'} {STORED.name}/"]), sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
