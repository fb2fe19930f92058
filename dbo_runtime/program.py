"""The public names for declaring the program of one micro-batch.

Adapters import these names from here. The code is in `dbo_runtime.ir`, which modules of this package import directly.
"""

from dbo_runtime.ir.op import COMM, COMPUTE, SIDE, Op
from dbo_runtime.ir.program import Program, ProgramBuilder
from dbo_runtime.ir.values import Value

__all__ = ["COMM", "COMPUTE", "SIDE", "Op", "Program", "ProgramBuilder", "Value"]
