"""`python -m dbo_runtime.lab.soak.engine_main FD`: a process of one engine, asked over a pipe.

Every message is a name and arguments; every answer whether it went well, and the result or the traceback.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any


def main() -> None:
    """Start the engine that the first message describes, then do what is asked until told to end."""
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
    except (EOFError, BrokenPipeError):  # who asked is gone
        os.killpg(0, signal.SIGKILL)
    except Exception:  # noqa: BLE001 - whatever it is, who asked has to see it
        pipe.send((False, traceback.format_exc()))


def _serve(pipe: Connection, engine: Any) -> None:
    """Do what is asked until that fails, after which the engine is not to be relied on, or the engine is closed."""
    name = ""
    while name != "close":
        name, arguments = pipe.recv()
        pipe.send((True, getattr(engine, name)(*arguments)))


if __name__ == "__main__":
    main()
