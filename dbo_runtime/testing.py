"""Helpers for tests: that an adapter's program equals its model, and that splitting changes no answer of a server.

See docs/write-an-adapter.md and docs/reliability.md. Importing this module imports vLLM.
It is the one public way into the laboratory, and no server imports it.
"""

from dbo_runtime.lab.soak.check import check_equivalence
from dbo_runtime.lab.soak.report import Bug, EquivalenceReport, Tally
from dbo_runtime.lab.verify.comparing_forward import Mismatch, Verification
from dbo_runtime.lab.verify.verification import verify_adapter

__all__ = ["Bug", "EquivalenceReport", "Mismatch", "Tally", "Verification", "check_equivalence", "verify_adapter"]
