"""Ends a program together with all that it started."""

from __future__ import annotations

import os
import signal
import subprocess


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a process that was started with `start_new_session=True`, first asking, then not.

    vLLM's engine and workers outlive a parent that is killed alone, and keep its port.
    """
    for kind, patience in ((signal.SIGTERM, 20.0), (signal.SIGKILL, 10.0)):
        try:
            os.killpg(process.pid, kind)
            process.wait(patience)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue
