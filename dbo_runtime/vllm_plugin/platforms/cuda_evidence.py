"""Evidence from GPUs that split steps equal unsplit ones. `make hardware` writes the file from runs of the GPU kit."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import NamedTuple

FILE = "cuda_evidence.json"
FIRST, SECOND = "first", "second"
"""vLLM's model runners, V1 and V2."""


class Evidence(NamedTuple):
    """Split steps that equalled unsplit ones on a GPU.

    Attributes:
        vllm: the release of vLLM.
        backend: name of the attention backend, such as FLASH_ATTN.
        runner: `FIRST` or `SECOND`.
        chip: name of the GPU.
        date: day of the run, as YYYY-MM-DD.
        steps: number of split steps compared.
    """

    vllm: str
    backend: str
    runner: str
    chip: str
    date: str
    steps: int


@cache
def read_evidence() -> tuple[Evidence, ...]:
    """Return all evidence in this release of the package; empty if no GPU has run the kit."""
    text = files(__package__).joinpath(FILE).read_text(encoding="utf-8")
    return tuple(Evidence(**entry) for entry in json.loads(text)["evidence"])
