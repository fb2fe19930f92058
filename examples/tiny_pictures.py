"""The tasks of the tiny Qwen2.5-VL: pictures of one shape each, and questions that have exactly one right answer.

======================  ==========  ========================
pictures                question    answer
======================  ==========  ========================
one                     ``what?``   ``small red on grey``
several                 ``2?``      what the second shows
none                    ``abc?``    ``abc``
======================  ==========  ========================

Sides, places, shapes, shades and noise are drawn from a seed. Training draws from even seeds, tests from odd ones. Only
numpy is needed: tests and demos import this module without torch.
"""

import random
import string
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

COLOURS = {"red": (1.0, 0.1, 0.1), "green": (0.1, 0.9, 0.1), "blue": (0.2, 0.2, 1.0), "yellow": (1.0, 0.9, 0.1)}
GROUNDS = {"black": (0.0, 0.2), "grey": (0.4, 0.6), "white": (0.8, 1.0)}
SIZES = {"small": (0.2, 0.28), "big": (0.4, 0.48)}  # radius by the shorter side
SHAPES = ("circle", "square", "cross")
SIDES = (56, 84, 112, 140)  # pixels: multiples of two patches, in windows of four
MOST_PICTURES = 3
NOISE = 0.06  # of the range of a channel
SLOT = "<|vision_start|><|image_pad|><|vision_end|>"  # where a picture goes in a prompt

Picture = NDArray[np.uint8]


class Question(NamedTuple):
    """Pictures [height, width, 3], a prompt with a slot for each, and its one right answer."""

    pictures: tuple[Picture, ...]
    prompt: str
    answer: str


def draw(rng: random.Random) -> tuple[Picture, str]:
    """Draw a picture and say what it shows."""
    size, colour, ground = (rng.choice(list(names)) for names in (SIZES, COLOURS, GROUNDS))
    height, width = rng.choice(SIDES), rng.choice(SIDES)
    radius = rng.uniform(*SIZES[size]) * min(height, width)
    row, column = rng.uniform(radius, height - radius), rng.uniform(radius, width - radius)
    rows, columns = np.mgrid[:height, :width]
    down, across = np.abs(rows - row), np.abs(columns - column)
    inside = {
        "circle": np.hypot(down, across) < radius,
        "square": np.maximum(down, across) < 0.9 * radius,
        "cross": (np.maximum(down, across) < radius) & (np.minimum(down, across) < 0.5 * radius),
    }[rng.choice(SHAPES)]
    noise = np.random.default_rng(rng.getrandbits(32)).normal(0, NOISE, (height, width, 3))
    values = np.where(inside[..., None], COLOURS[colour], rng.uniform(*GROUNDS[ground])) + noise
    return (np.clip(values, 0, 1) * 255).astype(np.uint8), f"{size} {colour} on {ground}"


def ask(rng: random.Random, pictures: int | None = None) -> Question:
    """Ask about so many pictures; draw how many if that is not given."""
    count = rng.choice((0, 1, 2, 2, MOST_PICTURES, MOST_PICTURES)) if pictures is None else pictures
    if count == 0:
        word = "".join(rng.choices(string.ascii_lowercase, k=rng.randint(2, 5)))
        return Question((), f"{word}?", word)
    drawn = [draw(rng) for _ in range(count)]
    which = rng.randrange(count)
    question = "what?" if count == 1 else f"{which + 1}?"
    return Question(tuple(picture for picture, _ in drawn), SLOT * count + question, drawn[which][1])


def training_stream(seed: int = 0) -> Iterator[Question]:
    """Yield questions without end."""
    rng = random.Random(2 * seed)
    while True:
        yield ask(rng)


def held_out(count: int, seed: int = 0) -> list[Question]:
    """Return questions that training never sees, the same ones each time."""
    rng = random.Random(2 * seed + 1)
    return [ask(rng, number % (MOST_PICTURES + 1)) for number in range(count)]
