"""Run a tiny model with one planted fault after the other, under each check: a line of JSON for each.

`verify` is the verification of the adapter on one rank; the other checks are values of DBO_CHECK, on two ranks that
are tensor parallel. A fault may end this process, so `run_probe` starts it again for the faults that are left.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from tests.support.reliability.adapter_faults import ADAPTER_FAULTS, Fault
from tests.support.reliability.metadata_faults import METADATA_FAULTS
from tests.support.reliability.worker_extension import EXTENSION, change_contexts

ROOT = Path(__file__).parents[3]
MODULE = "tests.support.reliability.probe"
VERIFY = "verify"
CHECKS = (VERIFY, "1", "races")
ENDED = "a rank died, or did not answer"
STEPS = 4  # of each fault, each a prefill and a decode
NEEDS_ENGINE = "needs a new engine"  # said by a process whose engine a fault has ended
SECONDS = 180.0  # without an outcome, after which a fault counts as a hang; an engine's start included


class Outcome(NamedTuple):
    """What a check said of a planted fault: empty if it saw nothing."""

    fault: str
    check: str
    error: str


def run_probe(
    model: Path, faults: Sequence[str], checks: Sequence[str] = CHECKS, dtype: str = "float32"
) -> Iterator[Outcome]:
    """Yield what is said of each fault under each check; what ends the process is said in its own words."""
    wanted = [(fault, check) for fault in faults for check in checks]
    while wanted:
        ended_for_next = True
        for outcome in _run_process(model, dtype, wanted):
            if outcome is None:
                ended_for_next = False
            else:
                yield outcome
                wanted = wanted[1:]
        if wanted and ended_for_next:
            yield Outcome(*wanted[0], ENDED)
            wanted = wanted[1:]


def _run_process(model: Path, dtype: str, wanted: Sequence[tuple[str, str]]) -> Iterator[Outcome | None]:
    """Yield what the process says, until it ends or has said nothing for some time; None if it wants a new engine."""
    process = subprocess.Popen(
        [sys.executable, "-m", MODULE, str(model), dtype, *(f"{fault}:{check}" for fault, check in wanted)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=ROOT,
        bufsize=0,  # what select says is about all that was written
        start_new_session=True,  # so that its workers can be ended together with it
    )
    assert process.stdout is not None
    try:
        deadline = time.monotonic() + SECONDS
        while select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
            line = process.stdout.readline()
            if not line:
                break
            if line.startswith(b'{"fault"'):  # vLLM says on standard output as well that it waits
                yield Outcome(**json.loads(line))
                deadline = time.monotonic() + SECONDS
            elif line.startswith(NEEDS_ENGINE.encode()):
                yield None
                break
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()


def main(model: str, dtype: str, words: Sequence[str]) -> None:
    """Run, and print."""
    served: list[Any] = []
    seeds = count()
    for word in words:
        fault, check = word.split(":")
        try:
            if check == VERIFY:
                error = verify(model, fault)
            else:
                served = served or [start_engine(model, dtype)]
                error = serve(served[0], fault, check, seeds)
        except Exception as raised:  # noqa: BLE001 - whatever it is, it was noticed
            error = str(raised)
        print(json.dumps(Outcome(fault, check, error)._asdict()), flush=True)
        if error and check != VERIFY and not is_alive(served[0]):
            print(NEEDS_ENGINE, flush=True)
            break
    os._exit(0)  # workers that a fault has left waiting end with the process


def start_engine(model: str, dtype: str) -> Any:
    """Start the engine that all faults are planted into."""
    from tests.support.vllm.engines import Engines, share_cores

    options = {"dtype": dtype, "attention_backend": "CPU_ATTN", "worker_extension_cls": EXTENSION}
    return Engines().get(2, share_cores(), Path(model), **options)


def is_alive(engine: Any) -> bool:
    """Return whether an engine still answers: what a dead one says of the next fault would be no finding."""
    from tests.support.vllm.engine import make_prompt

    try:
        engine.generate([make_prompt(20, 1)], tokens=2)
    except Exception:  # noqa: BLE001 - whatever it is, a new engine is needed
        return False
    return True


def serve(engine: Any, fault: str, check: str, seeds: Iterator[int]) -> str:
    """Run steps with a fault, none of whose prompts was there before; return what is said of it."""
    from tests.support.vllm.engine import make_prompt

    said = ""
    engine.llm.collective_rpc("plant", args=(fault,))
    engine.configure(DBO_CHECK=check)
    try:
        for seed in islice(seeds, STEPS):
            engine.generate([make_prompt(70 + seed % 7, seed), make_prompt(9, seed + 1000)], tokens=2)
    except Exception as raised:  # noqa: BLE001 - as above
        said = str(raised)
    with suppress(Exception):  # a dead engine is found out by `is_alive`
        engine.llm.collective_rpc("plant", args=(None,))
        engine.configure(DBO_CHECK="0")
        engine.abort_all()
    return said


def verify(model: str, name: str) -> str:
    """Verify the adapter with a fault; return the mismatches."""
    from dbo_runtime.lab.verify import verification
    from dbo_runtime.vllm_plugin.context.splitter import ContextSplitter

    record, split = verification.record_program, ContextSplitter.split
    with ExitStack() as patches:
        for fault in ADAPTER_FAULTS:
            if fault.__name__ == name:
                faulty = partial(_record_with, fault, record)
                patches.enter_context(patch.object(verification, "record_program", faulty))
        for change in METADATA_FAULTS:
            if change.__name__ == name:
                patches.enter_context(patch.object(ContextSplitter, "split", change_contexts(split, change)))
        found = verification.verify_adapter(model)
    return str(found) if found.mismatches else ""


def _record_with(fault: Fault, record: Any, *args: Any) -> Any:
    return fault(record(*args))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
