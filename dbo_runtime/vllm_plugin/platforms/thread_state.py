"""Thread-local torch state that a worker must share with the thread that began the step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch


def capture_thread_state() -> Callable[[], AbstractContextManager[None]]:
    """Return a factory of context managers that apply the calling thread's inference and grad mode in other threads."""
    inference, grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()

    @contextmanager
    def enter() -> Iterator[None]:
        with torch.inference_mode(inference), torch.set_grad_enabled(grad):
            yield

    return enter
