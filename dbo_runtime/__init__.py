"""Dual-batch overlap for LLM serving: compute one micro-batch while another communicates.

These names need neither torch nor vLLM. vLLM loads the plugin through its entry point; see README.md. The rest of the
public API is in docs/public-api.md.
"""

from dbo_runtime.batch import Batch, BatchSlice
from dbo_runtime.config import RuntimeConfig, read_environment
from dbo_runtime.decline import Decline
from dbo_runtime.errors import (
    ConfigError,
    DboError,
    DeviceError,
    ProgramError,
    RankError,
    SanitizerError,
    ScheduleError,
    SplitError,
    TransferError,
)
from dbo_runtime.ir.lowering import lower
from dbo_runtime.ir.op import Op
from dbo_runtime.ir.program import Program, ProgramBuilder
from dbo_runtime.ir.schedule import Instruction, Issue, Schedule
from dbo_runtime.ir.values import Value
from dbo_runtime.observe.counts import statistics

__all__ = [
    "Batch",
    "BatchSlice",
    "ConfigError",
    "DboError",
    "Decline",
    "DeviceError",
    "Instruction",
    "Issue",
    "Op",
    "Program",
    "ProgramBuilder",
    "ProgramError",
    "RankError",
    "RuntimeConfig",
    "SanitizerError",
    "Schedule",
    "ScheduleError",
    "SplitError",
    "TransferError",
    "Value",
    "lower",
    "read_environment",
    "statistics",
]
