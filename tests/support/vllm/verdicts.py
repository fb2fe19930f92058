"""What the doctor says of a serve command, and what the log says once an engine with the same words has started.

Both are asked in processes that are forked where vLLM is imported already: an engine takes seconds, a server a minute.
"""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

DATA_PARALLEL = "--data-parallel-size=2"


def examine_here(rank: int, words: Sequence[str], settings: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the state and the text of each finding of `dbo doctor -- vllm serve`, whose probes run in this process."""
    from dbo_runtime.lab.doctor import examination, serve_command

    os.environ.update(settings)
    with (
        patch.object(examination, "run_probe", probe_here),
        patch.object(serve_command, "run_probe", probe_here),
    ):
        findings = examination.examine(os.environ, command=serve_command.ServeCommand({}, tuple(words)))
    return [(finding.state, finding.found) for finding in findings]


def probe_here(subject: str, environ: Mapping[str, str], *arguments: str, **variables: str) -> dict[str, Any]:
    """Return what `run_probe` does, without a process of its own."""
    from dbo_runtime.lab.doctor import probe

    with redirect_stdout(StringIO()) as printed:
        probe.main(subject, *arguments)
    facts: dict[str, Any] = json.loads(printed.getvalue().rpartition(probe.MARK)[2])
    return facts


def start_engine(rank: int, words: Sequence[str], settings: Mapping[str, str], port: int, log: Path) -> None:
    """Start an engine as `vllm serve` does with *words*, as far as its log says it is ready, and end it.

    Data parallel ranks call this at once, with the same free *port*.
    """
    os.environ.update(settings)
    if DATA_PARALLEL in words:
        places = {"RANK": rank, "RANK_LOCAL": rank, "SIZE": 2, "MASTER_IP": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({f"VLLM_DP_{name}": str(value) for name, value in places.items()})
        os.environ.update(VLLM_HOST_IP="127.0.0.1", GLOO_SOCKET_IFNAME="lo")
    with log.open("a") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor import Executor, multiproc_executor

    from dbo_runtime.lab.start.arguments import make_config

    with patch.object(multiproc_executor, "get_mp_context", partial(multiprocessing.get_context, "fork")):
        config = make_config([word for word in words if word != DATA_PARALLEL])
        engine = EngineCore(config, Executor.get_class(config), log_stats=False)
        engine.shutdown()
