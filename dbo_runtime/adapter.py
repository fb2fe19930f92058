"""The public names for adapter authors: contracts, and the interfaces that declare communication.

Import these names from here. The code is in `dbo_runtime.adapters`, which modules of this package import
directly.
"""

from dbo_runtime.adapters.communication import Collectives, DividedAttention, ExpertParallel, LatentAttention
from dbo_runtime.adapters.contract import (
    INPUT_IDS,
    KEPT,
    POSITIONS,
    ArgumentAdapter,
    ConfigAdapter,
    EncoderAdapter,
    InputAdapter,
    ModelAdapter,
    OutputAdapter,
    RepeatableAdapter,
    StageAdapter,
    X,
    name_argument,
    name_auxiliary,
    record_program,
)

__all__ = [
    "INPUT_IDS",
    "KEPT",
    "POSITIONS",
    "ArgumentAdapter",
    "Collectives",
    "ConfigAdapter",
    "DividedAttention",
    "EncoderAdapter",
    "ExpertParallel",
    "InputAdapter",
    "LatentAttention",
    "ModelAdapter",
    "OutputAdapter",
    "RepeatableAdapter",
    "StageAdapter",
    "X",
    "name_argument",
    "name_auxiliary",
    "record_program",
]
