"""Give every reader of outside data what it should refuse, and count what becomes of it: `make fuzz`.

    python -m tests.reliability.bad_input --inputs 20000 --write-page

Each reader runs in a process of its own, which tells how much memory it took. Outcomes are kept in build/, so that a
reader may be run again alone; the table is of all.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from random import Random

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.support.kept import keep
from tests.support.page import make_table, tell_section
from tests.support.reliability.odd_inputs import list_large, place_oddly
from tests.support.reliability.outcomes import MAX_BYTES, MAX_KEPT, Outcomes
from tests.support.reliability.page import PAGE
from tests.support.reliability.readers import Reader, list_plugin_readers, list_readers, open_folder

MIB = 1 << 20


def main() -> int:
    """Fuzz all readers, print the table, and write it if asked; return 1 if there were other errors."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=20_000, help="of each reader (default: %(default)s)")
    parser.add_argument("--reader", help="only this one, such as `trace`")
    parser.add_argument("--write-page", action="store_true", help="write the table to docs/reliability.md")
    arguments = parser.parse_args()
    names = [reader.name for reader in _list_all() if arguments.reader in (None, reader.name)]
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as pool:
        outcomes = dict(zip(names, pool.map(fuzz_named, names, [arguments.inputs] * len(names)), strict=True))
    for name, found in outcomes.items():
        for error in found.others[:MAX_KEPT]:
            print(f"{name}: {error}", file=sys.stderr)
    command = f"python -m tests.reliability.bad_input --inputs {arguments.inputs}"
    kept = keep("bad-input", {name: asdict(found) for name, found in outcomes.items()})
    known = {reader.name: Outcomes(**kept[reader.name]) for reader in _list_all() if reader.name in kept}
    tell_section(arguments.write_page, "bad-input", command, describe(known), PAGE)
    return int(any(found.others for found in outcomes.values()))


def _list_all() -> list[Reader]:
    return [*list_readers(), *(list_plugin_readers() if find_spec("vllm") else [])]


def fuzz_named(name: str, inputs: int) -> Outcomes:
    """Fuzz the reader of this name, also with what is large or no file."""
    reader = next(reader for reader in _list_all() if reader.name == name)
    outcomes = fuzz(reader, inputs)
    read_odd_places(reader, outcomes)
    read_large(reader, outcomes)
    return outcomes


def fuzz(reader: Reader, inputs: int, outcomes: Outcomes | None = None) -> Outcomes:
    """Give a reader so many inputs that hypothesis draws."""
    outcomes = outcomes or Outcomes()
    with tempfile.TemporaryDirectory(prefix="dbo-fuzz-") as name, open_folder(Path(name)) as prepare:

        @settings(
            max_examples=max(int(inputs * reader.share), 1),
            phases=[Phase.generate],
            database=None,
            suppress_health_check=[*HealthCheck],
            deadline=None,
        )
        @given(st.randoms(use_true_random=True))
        def draw(chance: Random) -> None:
            made = reader.make(chance)
            outcomes.observe(prepare(reader, made), made, reader.seconds)

        draw()
    return outcomes


def read_odd_places(reader: Reader, outcomes: Outcomes) -> None:
    """Give a reader of files what is no file."""
    with tempfile.TemporaryDirectory(prefix="dbo-fuzz-") as name:
        for what, path in place_oddly(Path(name)).items() if reader.file else ():
            if reader.file == "config.json":  # whose reader takes the folder
                path = f"{path}/config.json"
            outcomes.observe(lambda path=path: reader.read(path), what)


def read_large(reader: Reader, outcomes: Outcomes) -> None:
    """Give a reader of files large ones."""
    with tempfile.TemporaryDirectory(prefix="dbo-fuzz-") as name, open_folder(Path(name)) as prepare:
        for what, make in list_large(reader.valid or {}) if reader.file else ():
            outcomes.observe(prepare(reader, make()), what)


def describe(outcomes: dict[str, Outcomes]) -> list[str]:
    """Return the lines of the table."""
    rows = [
        (
            name,
            found.inputs,
            found.accepted,
            found.refused,
            f"{found.slowest:.2f} s",
            f"{found.memory / MIB:.0f} MiB",
            len(found.others) + (found.memory > MAX_BYTES),
        )
        for name, found in outcomes.items()
    ]
    return make_table(["reader", "inputs", "accepted", "refused", "slowest", "most memory", "other errors"], rows)


if __name__ == "__main__":
    sys.exit(main())
