"""Run the suites that touch vLLM in the environment of one of its versions: `make test-compat VLLM=0.32.0`.

Called with that environment's Python. Prints how many of each suite passed, and fails if one fails or none passed.
`--write` keeps the counts, failures too, in `tests/compat/results.json`, from which `make docs` writes the table of
docs/vllm.md. Suites may be named; `--quick` runs those that CI has time for.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "tests" / "compat" / "results.json"
TESTS = "tests/vllm_plugin"
SUITES = MappingProxyType(
    {
        "hooks": ("test_register.py", "test_extension.py", "install"),
        "metadata": ("api", "context", "platforms", "step"),
        "equivalence": (
            "end_to_end/test_equivalence.py",
            "end_to_end/test_families.py",
            "end_to_end/test_deepseek_adapter.py",
        ),
        "parallel": (
            "parallel",
            "end_to_end/test_pipeline.py",
            "end_to_end/test_pipeline_families.py",
            "end_to_end/test_expert_parallel.py",
        ),
        "failures": ("end_to_end/test_failures.py",),
        "concurrent ops": ("end_to_end/test_side.py",),
        "multimodal": ("encoder", "end_to_end/test_qwen_vl.py"),
        "features": (
            "alternatives",
            "telemetry",
            *(
                f"end_to_end/test_{name}.py"
                for name in (
                    "bfloat16",
                    "failing_adapters",
                    "kv_connectors",
                    "linear_attention",
                    "lora",
                    "nano_batches",
                    "nano_only",
                    "pooling",
                    "request_features",
                    "serving",
                    "speculative",
                )
            ),
        ),
    }
)
"""Files and folders of tests by suite."""

QUICK = ("hooks", "metadata", "equivalence", "failures")
OUTCOMES = ("passed", "failed", "skipped")
# As the Makefile runs such tests: files whole, for engines are shared in a file.
PARALLEL = ("-n", "2", "--dist", "loadfile", "--no-loadscope-reorder")


def main() -> int:
    """Run the suites, print their counts, and keep them if asked to."""
    parser = argparse.ArgumentParser(description="Run the suites that touch vLLM on the version installed here.")
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"all, or some of: {', '.join(SUITES)}")
    parser.add_argument("--quick", action="store_true", help=f"run only: {', '.join(QUICK)}")
    parser.add_argument("--write", action="store_true", help=f"keep the counts in {RESULTS.relative_to(ROOT)}")
    arguments = parser.parse_args()
    suites = QUICK if arguments.quick else tuple(arguments.suites or SUITES)
    unknown = set(suites) - set(SUITES)
    if unknown:
        parser.error(f"no such suite: {', '.join(sorted(unknown))}")
    vllm = version("vllm").partition("+")[0]
    counts = run_suites(suites)
    for suite in suites:
        print(f"vLLM {vllm}, {suite}: {', '.join(f'{counts[suite, outcome]} {outcome}' for outcome in OUTCOMES)}")
    if arguments.write:
        write_results(vllm, {suite: {outcome: counts[suite, outcome] for outcome in OUTCOMES} for suite in suites})
    return int(any(counts[suite, "failed"] or not counts[suite, "passed"] for suite in suites))


def run_suites(suites: tuple[str, ...]) -> Counter[tuple[str, str]]:
    """Run the tests of some suites; return how many of each had which outcome."""
    files = [f"{TESTS}/{path}" for suite in suites for path in SUITES[suite]]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", *files, "-m", "not slow", *PARALLEL, "--junitxml", str(report)]
        subprocess.run(command, cwd=ROOT, check=False)
        return count_outcomes(report) if report.is_file() else Counter()


def count_outcomes(report: Path) -> Counter[tuple[str, str]]:
    """Count the tests of a report of pytest by suite and outcome; an error of a fixture is a failure."""
    counts: Counter[tuple[str, str]] = Counter()
    for case in ElementTree.parse(report).iter("testcase"):
        found = {child.tag for child in case}
        outcome = "failed" if found & {"failure", "error"} else "skipped" if "skipped" in found else "passed"
        counts[find_suite(case.get("file") or ""), outcome] += 1
    return counts


def find_suite(file: str) -> str:
    """Return the suite that a file of tests belongs to."""
    path = Path(file)
    places = {Path(TESTS) / place: suite for suite, places in SUITES.items() for place in places}
    return next(suite for place, suite in places.items() if place == path or place in path.parents)


def write_results(vllm: str, suites: dict[str, dict[str, int]]) -> None:
    """Keep the counts of some suites on a version of vLLM, next to those of others."""
    results = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    kept = results.setdefault(vllm, {"suites": {}})
    kept.update(date=datetime.date.today().isoformat(), torch=version("torch"), transformers=version("transformers"))
    kept["suites"].update(suites)
    RESULTS.write_text(json.dumps(dict(sorted(results.items())), indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
