"""A worker extension that lets the adapter of dense models fail, as with a version of vLLM that lacks an attribute.

It is in force where it is imported, which vLLM does in the workers that it is named for. `FAILING` says what fails:
`op`, when it runs.
"""

from __future__ import annotations

import os
from typing import Any

import dbo_models.layers as parts
from dbo_runtime.vllm_plugin.extension import WorkerExtension

VARIABLE = "FAILING"
MESSAGE = "'Attention' object has no attribute 'input_norm'"


class Extension(WorkerExtension):
    """Like the one that it extends."""


def fail(*_: Any, **__: Any) -> Any:
    raise AttributeError(MESSAGE)


if os.environ.get(VARIABLE) == "op":
    parts._final_norm = fail
