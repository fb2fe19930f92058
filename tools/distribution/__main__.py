"""Build, check and try out the packages of the last commit; `--release` is all but the upload."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .checkout import check_release, read_address
from .commands import DistError
from .packages import make_packages, try_out

ROOT = Path(__file__).resolve().parents[2]
ADVICE = "give PROJECT_URL=https://HOST/OWNER/NAME, or git an `origin` on a host"


def main() -> int:
    """Build into a folder, and say what was built."""
    parser = argparse.ArgumentParser(description="Build, check and try out the packages of the last commit.")
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / "dist", help="where they go (dist)")
    parser.add_argument("--release", action="store_true", help="refuse what is not tagged and dated, too")
    arguments = parser.parse_args()
    try:
        if arguments.release:
            check_release(ROOT)
        address = read_address(ROOT)
        packages = make_packages(ROOT, arguments.folder, address)
        for package in packages:
            try_out(package)
    except DistError as error:
        print(f"dist: {error}", file=sys.stderr)
        return 1
    print("\n".join(f"built, checked and tried out: {package}" for package in packages))
    print(f"links of README.md lead to {address}" if address else f"links of README.md stay relative: {ADVICE}")
    if arguments.release:
        print(f"to publish: {sys.executable} -m twine upload {' '.join(map(str, packages))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
