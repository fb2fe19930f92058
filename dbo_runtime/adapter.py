"""What adapters are written against: their contracts, and what they declare communication with.

The names here are those to import in an adapter. The code is in `dbo_runtime.adapters`, from which
modules of this package import it.
"""

from dbo_runtime.adapters.communication import Collectives, ExpertParallel, LatentAttention
from dbo_runtime.adapters.contract import (
    INPUT_IDS,
    KEPT,
    POSITIONS,
    EncoderAdapter,
    InputAdapter,
    ModelAdapter,
    OutputAdapter,
    RepeatableAdapter,
    StageAdapter,
    X,
    name_auxiliary,
    record_program,
)

__all__ = [
    "INPUT_IDS",
    "KEPT",
    "POSITIONS",
    "Collectives",
    "EncoderAdapter",
    "ExpertParallel",
    "InputAdapter",
    "LatentAttention",
    "ModelAdapter",
    "OutputAdapter",
    "RepeatableAdapter",
    "StageAdapter",
    "X",
    "name_auxiliary",
    "record_program",
]
