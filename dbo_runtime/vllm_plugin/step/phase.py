"""The phases of a server, by which steps are decided."""

from __future__ import annotations

from enum import Enum


class Phase(Enum):
    """What vLLM is doing with the model."""

    STARTING = "profiling, compiling and capturing unsplit steps"
    PROFILING = "profiling the memory of split steps"
    SERVING = "serving requests"
