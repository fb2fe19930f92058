"""What an adapter declares: the program of one micro-batch. The names here are those to import in an adapter.

The code is in `dbo_runtime.ir`. Modules of this package import it from there.
"""

from dbo_runtime.ir.op import COMM, COMPUTE, SIDE, Op
from dbo_runtime.ir.program import Program, ProgramBuilder
from dbo_runtime.ir.values import Value

__all__ = ["COMM", "COMPUTE", "SIDE", "Op", "Program", "ProgramBuilder", "Value"]
