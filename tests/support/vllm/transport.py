"""What a worker takes to carry its collectives."""

from __future__ import annotations

from typing import Any


def set_transport(worker: Any, transport: str) -> None:
    worker.model_runner.get_model().forward.decider._transport = transport
