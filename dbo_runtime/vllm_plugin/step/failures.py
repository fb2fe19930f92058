"""Turn errors of adapters into declines: a model whose adapter fails is served unsplit.

Adapters read attributes of vLLM's modules that other versions of vLLM may not have. `dbo adapter` raises such errors,
because authors of adapters want to see them. A server goes on without overlap.
"""

from __future__ import annotations

import inspect
import re
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from dbo_runtime.adapters.contract import locate_source, name_adapter
from dbo_runtime.decline import Decline, DeclineError
from dbo_runtime.errors import DboError, ProgramError
from dbo_runtime.vllm_plugin.api.rank_store import read_outcomes, report_outcome
from dbo_runtime.vllm_plugin.api.versions import get_version

if TYPE_CHECKING:
    from vllm.distributed.parallel_state import GroupCoordinator

Result = TypeVar("Result")

FAILED = "its adapter fails with this model and version of vLLM"
FAILED_STEP = "its first split step fails with this version of vLLM"
ALONE_SECONDS = 30.0
"""Seconds that a failed rank waits for the reports of the others, which may hang in a collective that it has left."""
PATIENCE_SECONDS = 600.0
"""Seconds that a rank that has not failed waits for the others, which may be slow, or compile."""
MAX_DETAIL = 500  # characters of an error's text
_ADDRESS = re.compile(r"0x[0-9a-f]+")


def call_adapter(adapter: Any, call: Callable[[], Result]) -> Result | Decline:
    """Return the result of calling an adapter's method. If it raises, return a decline that says what and where.

    The text of the decline is equal on ranks that fail alike, so that they agree on it.
    """
    try:
        return call()
    except DeclineError as error:
        return error.decline
    except Exception as error:  # noqa: BLE001 - whatever an adapter's code raises, the model is served unsplit
        cause = error.__cause__ if isinstance(error, ProgramError) and error.__cause__ is not None else error
        where = "" if isinstance(cause, DboError) else f", at {_locate(adapter, cause)}"  # our errors say where
        return Decline(FAILED, f"{name_adapter(adapter)}: {describe_error(cause)}{where}; vLLM {get_version()}")


def describe_error(error: BaseException) -> str:
    """Return the type and text of an error, and the op that raised it, without addresses of objects."""
    notes = getattr(error, "__notes__", [])
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return _ADDRESS.sub("0x...", "; ".join([text[:MAX_DETAIL], *notes]))


def attempt(
    group: GroupCoordinator, name: str, job: Callable[[], Result], patience: float = ALONE_SECONDS
) -> Result | Decline:
    """Run a job that communicates for the first time; return its result, or a decline if a rank has failed.

    All ranks of *group* must call it alike. No rank declines before all have finished, so none is left in a collective.
    *job* must wait for the device.

    Raises:
        Exception: the error of the job, if another rank does not finish within *patience* seconds. That rank may be
            waiting in a collective for this one.
        DistError: if this rank has not failed, and another does not finish within `PATIENCE_SECONDS`.
    """
    failure: Exception | None = None
    try:
        result = job()
    except Exception as error:  # noqa: BLE001 - whatever an op raises, the model is served unsplit
        failure = error
    own = "" if failure is None else describe_error(failure)
    if group.world_size == 1:
        outcomes: list[str | None] = [own]
    else:
        this = report_outcome(name, own)
        outcomes = read_outcomes(this, group.ranks, PATIENCE_SECONDS if failure is None else patience)
    if failure is not None and None in outcomes:
        raise failure
    if None in outcomes:
        raise dist.DistError(f"rank {group.ranks[outcomes.index(None)]} has not come to the end of its {name}")
    found = next(filter(None, outcomes), None)
    return result if found is None else Decline(FAILED_STEP, f"{found}; vLLM {get_version()}")


def _locate(adapter: Any, error: BaseException) -> str:
    """Return `file:line` of the innermost call in the adapter's package, or else of the adapter's class."""
    try:
        package = Path(inspect.getfile(type(adapter))).parent
    except (OSError, TypeError):
        return locate_source(type(adapter))
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if Path(frame.filename).parent == package:
            name = type(adapter).__module__.rpartition(".")[0].replace(".", "/")
            return f"{name}/{Path(frame.filename).name}:{frame.lineno}"  # the same on all hosts
    return locate_source(type(adapter))
