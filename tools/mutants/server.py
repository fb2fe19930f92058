"""Try mutants of one module, each in a process of its own that is forked from one with all imports done.

The command starts it as `python -m tools.mutants.server`, one JSON on its input (`Order`), and one line of JSON for
each mutant on its output (`Verdict`).
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from .finder import put_in
from .mutations import Mutation
from .trial import LEFT_OUT, OPTIONS, Baseline, Choice, Watch

KILLED, SURVIVED, HUNG = "killed", "survived", "hung"
START_SECONDS = 300  # for a mutant to be imported with its tests
BASELINE_SECONDS = 1800  # for all tests on the module as it is


class Order(NamedTuple):
    """What to try.

    Attributes:
        root: of the repository.
        name: of the module.
        tests: files.
        mutations: of the module.
        slack: seconds that each test may take on top of many times what it takes on the module as it is.
    """

    root: str
    name: str
    tests: list[str]
    mutations: list[Mutation]
    slack: float = 60.0  # the first test of all may have processes to start

    @property
    def path(self) -> Path:
        """The module's file."""
        return find_source(Path(self.root), self.name)


class Verdict(NamedTuple):
    """What became of a mutant.

    Attributes:
        outcome: KILLED, HUNG (which is killed, too), or SURVIVED.
        by: the test that failed; None if none did, or the mutant could not be imported.
        seconds: that its tests take on the module as it is.
    """

    outcome: str
    by: str | None
    seconds: float


class Failed(Exception):
    """The tests do not pass on the module as it is."""


def find_source(root: Path, name: str) -> Path:
    """Return the file of a module."""
    return root.joinpath(*name.split(".")).with_suffix(".py")


def main() -> int:
    """Answer one order. What tests, or what they import, print to the standard output goes to that of errors."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    order = Order(**json.load(sys.stdin))
    order = order._replace(mutations=[Mutation(*fields) for fields in order.mutations])
    os.chdir(order.root)
    try:
        preload(order)
        baseline = Baseline(**insist(run_apart(lambda: run_baseline(order))))
        check_survival(order, baseline)
    except Failed as failure:
        print(failure, file=sys.stderr)
        return 1
    for mutation in order.mutations:
        print(json.dumps(try_mutant(order, baseline, mutation)), file=answers, flush=True)
    return 0


def preload(order: Order) -> None:
    """Import whatever the tests import, except for the repository's own modules, with the environment that they set."""
    found = insist(run_apart(lambda: collect(order)))
    os.environ.update(found["environment"])
    for name in found["modules"]:
        with suppress(Exception):  # some can be imported from their packages only; the tests do that again
            importlib.import_module(name)
    if order.name in sys.modules:
        raise Failed(f"{order.name} is imported by an installed module, so no mutant would be.")


def collect(order: Order) -> dict[str, Any]:
    """Return the names of all modules that the tests import from outside of the repository, and their environment."""
    if run_pytest(order.tests, ["--collect-only"], BASELINE_SECONDS) != pytest.ExitCode.OK:
        raise Failed(f"{order.name}: its tests cannot be imported.")
    modules = [name for name, module in sys.modules.items() if is_foreign(module)]
    return {"modules": modules, "environment": dict(os.environ)}


def is_foreign(module: ModuleType) -> bool:
    """Return whether a module is installed, or Python's own: neither the repository's nor installed to be edited."""
    file = getattr(module, "__file__", None)
    return file is not None and ("site-packages" in Path(file).parts or Path(sys.base_prefix) in Path(file).parents)


def run_baseline(order: Order) -> dict[str, Any]:
    """Run the tests on the module as it is."""
    watch = Watch(order.path)
    if run_pytest(order.tests, [], BASELINE_SECONDS, watch) != pytest.ExitCode.OK:
        raise Failed(f"{order.name}: its tests fail on the module as it is.")
    return watch.get_baseline()._asdict()


def check_survival(order: Order, baseline: Baseline) -> None:
    """Raise Failed unless the module as it is survives: tests that depend on their order would kill any mutant."""
    tests = sorted(baseline.seconds, key=lambda test: baseline.seconds[test])
    verdict = judge(order, baseline, tests, None)
    if verdict.outcome != SURVIVED:
        found = "a test takes too long" if verdict.outcome == HUNG else f"{verdict.by} fails"
        raise Failed(f"{order.name}: on the module as it is, {found} in another order.")


def try_mutant(order: Order, baseline: Baseline, mutation: Mutation) -> Verdict:
    """Run the tests that may notice a mutation."""
    return judge(order, baseline, baseline.choose(mutation), mutation)


def judge(order: Order, baseline: Baseline, tests: Sequence[str], mutation: Mutation | None) -> Verdict:
    """Run tests in this order until one fails, on a mutant or on the module as it is."""

    def run() -> tuple[int, str | None]:
        if mutation is not None:
            put_in(order.name, order.path, mutation)
        choice = Choice(tests, baseline.seconds, order.slack)
        files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
        return run_pytest(files, [], START_SECONDS, choice), choice.failed

    ran = run_apart(run)
    seconds = sum(baseline.seconds[test] for test in tests)
    if ran is None:
        return Verdict(HUNG, None, seconds)
    code, failed = ran
    return Verdict(SURVIVED if code == pytest.ExitCode.OK else KILLED, failed, seconds)


def run_pytest(files: Sequence[str], options: Sequence[str], seconds: float, *plugins: object) -> int:
    """Run pytest in this process, which ends after so many seconds unless a plugin gives it others."""
    signal.setitimer(signal.ITIMER_REAL, seconds)
    return int(pytest.main([*OPTIONS, "-m", f"not ({LEFT_OUT})", *options, *files], plugins=plugins))


def run_apart(function: Callable[[], Any]) -> Any:
    """Return what a function returns in a forked process; None if that is ended by a signal. Its output is discarded.

    Raises:
        Failed: if the function raises, with its output.
    """
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        result, output = Path(folder, "result"), Path(folder, "output")
        process = os.fork()
        if process == 0:
            _run_and_exit(function, result, output)
        _, status = os.waitpid(process, 0)
        with suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)  # what it has started and left
        if os.WIFSIGNALED(status):
            return None
        if os.WEXITSTATUS(status) or not result.exists():
            raise Failed(output.read_text(errors="replace")[-4000:])
        return json.loads(result.read_text())


def insist(result: Any) -> Any:
    """Return a result, unless the process that should have made it was ended."""
    if result is None:
        raise Failed(f"its tests end by a signal, or take longer than {BASELINE_SECONDS} s, on the module as it is.")
    return result


def _run_and_exit(function: Callable[[], Any], result: Path, output: Path) -> None:
    """Run a function in this process, which is forked, and end it without the parent's clean-up."""
    status = 1
    try:
        os.setsid()
        with output.open("w") as written:
            os.dup2(written.fileno(), 1)
            os.dup2(written.fileno(), 2)
        result.write_text(json.dumps(function()))
        status = 0
    except BaseException as error:  # noqa: BLE001 - whatever it is, this process must not go on as its parent
        os.write(2, f"{type(error).__name__}: {error}".encode())
    finally:
        os._exit(status)


if __name__ == "__main__":
    sys.exit(main())
