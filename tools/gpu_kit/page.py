"""Store results of a GPU, and write from all that are stored docs/hardware.md and the list of evidence.

python -m tools.gpu_kit.page [results.json]     # make hardware RESULTS=FILE
python -m tools.gpu_kit.page --check            # write nothing; exit with 1 if a file is stale
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from .evidence import EVIDENCE, ResultsError, list_evidence, read_all, read_results, store_results
from .machine import ROOT
from .tables import write_page

PAGE = ROOT / "docs" / "hardware.md"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write both files, or name those that are stale."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a file is stale")
    parser.add_argument("results", nargs="?", type=Path, help="results.json of a machine with a GPU")
    options = parser.parse_args(arguments)
    is_check: bool = options.check
    try:
        if options.results is not None and not is_check:
            print(f"stored: {store_results(read_results(options.results)).relative_to(ROOT)}")
        written = compose()
    except ResultsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    stale = [path for path, text in written.items() if not path.is_file() or path.read_text() != text]
    for path in stale:
        if not is_check:
            path.write_text(written[path])
        print(f"{path.relative_to(ROOT)}: {'stale; run `make hardware`' if is_check else 'written'}")
    return 1 if is_check and stale else 0


def compose() -> dict[Path, str]:
    """Return the content of each file, given the results that are stored."""
    all_results = read_all()
    evidence = json.dumps({"evidence": list_evidence(all_results)}, indent=2) + "\n"
    return {PAGE: write_page(all_results), EVIDENCE: evidence}


if __name__ == "__main__":
    sys.exit(main())
