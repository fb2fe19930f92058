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
START_SECONDS = 300  # to import a module and its tests


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
    slack: float = 20.0

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
    """Answer one order."""
    order = Order(**json.load(sys.stdin))
    order = order._replace(mutations=[Mutation(*fields) for fields in order.mutations])
    os.chdir(order.root)
    try:
        preload(order)
        baseline = Baseline(**run_apart(lambda: run_baseline(order)))
    except Failed as failure:
        print(failure, file=sys.stderr)
        return 1
    for mutation in order.mutations:
        print(json.dumps(try_mutant(order, baseline, mutation)), flush=True)
    return 0


def preload(order: Order) -> None:
    """Import whatever the tests import, except for the repository's own modules, with the environment that they set."""
    found = run_apart(lambda: collect(order))
    os.environ.update(found["environment"])
    for name in found["modules"]:
        with suppress(Exception):  # some can be imported from their packages only; the tests do that again
            importlib.import_module(name)


def collect(order: Order) -> dict[str, Any]:
    """Return the names of all modules that the tests import from outside of the repository, and their environment."""
    if run_pytest(order.tests, ["--collect-only"]) != pytest.ExitCode.OK:
        raise Failed(f"{order.name}: its tests cannot be imported.")
    modules = [name for name, module in sys.modules.items() if is_foreign(module, Path(order.root))]
    return {"modules": modules, "environment": dict(os.environ)}


def is_foreign(module: ModuleType, root: Path) -> bool:
    """Return whether a module comes from a file outside of the repository, or from a package installed inside."""
    file = getattr(module, "__file__", None)
    return file is not None and (root not in Path(file).parents or "site-packages" in Path(file).parts)


def run_baseline(order: Order) -> dict[str, Any]:
    """Run the tests on the module as it is."""
    watch = Watch(order.path)
    if run_pytest(order.tests, [], watch) != pytest.ExitCode.OK:
        raise Failed(f"{order.name}: its tests fail on the module as it is.")
    return watch.get_baseline()._asdict()


def try_mutant(order: Order, baseline: Baseline, mutation: Mutation) -> Verdict:
    """Run the tests that execute what is mutated."""
    tests = baseline.choose(mutation)
    seconds = sum(baseline.seconds[test] for test in tests)

    def run() -> tuple[int, str | None]:
        put_in(order.name, order.path, mutation)
        choice = Choice(tests, baseline.seconds, order.slack)
        files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
        return int(run_pytest(files, [], choice)), choice.failed

    ran = run_apart(run)
    if ran is None:
        return Verdict(HUNG, None, seconds)
    code, failed = ran
    return Verdict(SURVIVED if code == pytest.ExitCode.OK else KILLED, failed, seconds)


def run_pytest(files: Sequence[str], options: Sequence[str], *plugins: object) -> int:
    """Run pytest in this process."""
    signal.setitimer(signal.ITIMER_REAL, START_SECONDS)
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
