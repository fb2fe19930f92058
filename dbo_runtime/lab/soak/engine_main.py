"""`python -m dbo_runtime.lab.soak.engine_main FD`: a process with one engine, controlled through a pipe.

Each message is a name and arguments. Each answer says whether it went well, with the result or the traceback.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any


def main() -> None:
    """Start the engine that the first message describes, then execute messages until told to end."""
    pipe = Connection(int(sys.argv[1]))
    try:
        model, loras, options = pipe.recv()
    except EOFError:
        return
    engine: Any = None
    try:
        from dbo_runtime.lab.soak.engine import Engine  # vLLM's import may fail, too

        engine = Engine(model, loras, options)
        pipe.send((True, engine.abilities))
        _serve(pipe, engine)
    except (EOFError, BrokenPipeError):  # the other end has closed
        os.killpg(0, signal.SIGKILL)
    except Exception:  # noqa: BLE001 - whatever it is, the other end has to see it
        pipe.send((False, traceback.format_exc()))


def _serve(pipe: Connection, engine: Any) -> None:
    """Execute messages until one fails, after which the engine is not reliable, or until the engine is closed."""
    name = ""
    while name != "close":
        name, arguments = pipe.recv()
        pipe.send((True, getattr(engine, name)(*arguments)))


if __name__ == "__main__":
    main()
