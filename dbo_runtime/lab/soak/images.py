"""Images for random traffic, and the prompt around an image according to the model's chat template."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

QUESTION = "what?"


def draw_image(seed: int, width: int, height: int) -> NDArray[np.uint8]:
    """Return noise [height, width, 3] in blocks of pixels, so that an encoder has something to tell apart."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (-(-height // 14), -(-width // 14), 3))
    pixels = blocks.repeat(14, axis=0).repeat(14, axis=1)[:height, :width] + rng.integers(-20, 21, (height, width, 3))
    return np.clip(pixels, 0, 255).astype(np.uint8)


def find_image_prompt(config: Any, tokenizer: Any) -> str | None:
    """Return the text of a prompt with one image; None if the model takes no images or has no template.

    Args:
        config: vLLM's configuration of the model.
        tokenizer: the model's tokenizer, or None.
    """
    limits = getattr(config, "multimodal_config", None)
    if tokenizer is None or limits is None or not limits.get_limit_per_prompt("image"):
        return None
    if getattr(limits, "language_model_only", False) or not getattr(tokenizer, "chat_template", None):
        return None
    content = [{"type": "image"}, {"type": "text", "text": QUESTION}]
    messages = [{"role": "user", "content": content}]
    text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return text
