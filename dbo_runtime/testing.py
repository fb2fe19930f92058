"""For authors of adapters: does the program do what the model does? See docs/write-an-adapter.md."""

from dbo_runtime.vllm_plugin.verify.verification import Mismatch, Verification, verify_adapter

__all__ = ["Mismatch", "Verification", "verify_adapter"]
