"""The tasks of the tiny DeepSeek-V3: short prompts that have exactly one right answer.

========  =============  ========
kind      prompt         answer
========  =============  ========
add       ``12+57=``     ``69``
rev       ``rev:abc=``   ``cba``
sort      ``sort:cab=``  ``abc``
copy      ``copy:abc=``  ``abc``
========  =============  ========

A tenth of all prompts is never trained on. Which ones follows from a hash of the prompt alone, so a test knows them
without a list and without the training run. Pure Python: tests and demos import this module without torch.
"""

import hashlib
import random
import string
from collections.abc import Iterator
from typing import NamedTuple

KINDS = ("add", "rev", "sort", "copy")
TRAINING_WEIGHTS = (0.40, 0.25, 0.20, 0.15)  # share of each kind in training: the harder the task, the more of it
SHORTEST_WORD, LONGEST_WORD = 2, 8  # letters
HELD_OUT_ONE_IN = 10
MOST_PER_KIND = 900  # only about 1,000 of the 100 x 100 additions are held out


class Task(NamedTuple):
    """A prompt and its one right answer."""

    kind: str
    prompt: str
    answer: str


def add(left: int, right: int) -> Task:
    """State the addition of two numbers."""
    return Task("add", f"{left}+{right}=", str(left + right))


def transform(kind: str, word: str) -> Task:
    """State the task of reversing, sorting or copying a word."""
    answers = {"rev": word[::-1], "sort": "".join(sorted(word)), "copy": word}
    return Task(kind, f"{kind}:{word}=", answers[kind])


def sample(rng: random.Random, kind: str | None = None) -> Task:
    """Draw a task, held out or not; without ``kind``, draw that too, in the proportions of training."""
    kind = kind or rng.choices(KINDS, TRAINING_WEIGHTS)[0]
    if kind == "add":
        return add(rng.randrange(100), rng.randrange(100))
    length = rng.randint(SHORTEST_WORD, LONGEST_WORD)
    return transform(kind, "".join(rng.choices(string.ascii_lowercase, k=length)))


def is_held_out(prompt: str) -> bool:
    """Return whether training never sees this prompt."""
    digest = hashlib.sha256(prompt.encode()).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_ONE_IN == 0


def training_stream(seed: int) -> Iterator[Task]:
    """Yield tasks to train on, without end and without the held-out ones."""
    rng = random.Random(seed)
    while True:
        task = sample(rng)
        if not is_held_out(task.prompt):
            yield task


def held_out(per_kind: int, seed: int = 0) -> list[Task]:
    """Draw ``per_kind`` different held-out tasks of every kind, kind after kind; at most ``MOST_PER_KIND``."""
    if per_kind > MOST_PER_KIND:
        raise ValueError(f"per_kind is {per_kind}, but at most {MOST_PER_KIND} can be drawn")
    rng = random.Random(seed)
    return [task for kind in KINDS for task in draw_held_out(rng, kind, per_kind)]


def draw_held_out(rng: random.Random, kind: str, count: int) -> list[Task]:
    """Draw ``count`` different held-out tasks of one kind."""
    drawn: dict[str, Task] = {}  # by prompt
    while len(drawn) < count:
        task = sample(rng, kind)
        if is_held_out(task.prompt):
            drawn[task.prompt] = task
    return list(drawn.values())
