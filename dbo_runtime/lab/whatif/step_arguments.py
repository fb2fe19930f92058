"""The step that the arguments of `dbo plan` describe."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

from dbo_runtime.batch import Batch
from dbo_runtime.errors import ConfigError
from dbo_runtime.lab.whatif.estimate import resize_batch
from dbo_runtime.setting_values import read_count

DEFAULT_TOKENS = 8192
MAX_TOKENS = 1 << 22  # tokens in a step; larger numbers are errors
MAX_REQUESTS = 1 << 14


def make_batch(arguments: argparse.Namespace, usual: Batch | None) -> Batch:
    """Return the step that the arguments describe. What they leave out is as in the *usual* step.

    Raises:
        ConfigError: an argument is not allowed, or two contradict each other. The message names them.
    """
    usual = usual or Batch((DEFAULT_TOKENS,), DEFAULT_TOKENS)
    given = arguments.context
    context = max(usual.contexts) if given is None else parse_count("--context", given, least=0)
    for name in ("query_lens", "decodes"):
        if getattr(arguments, name) is not None and (arguments.tokens is not None or arguments.requests is not None):
            raise ConfigError(
                f"--{name.replace('_', '-')} says everything about the requests; leave out --tokens and --requests."
            )
    if arguments.query_lens is not None:
        if arguments.decodes is not None:
            raise ConfigError("--query-lens says everything about the requests; leave out --decodes.")
        return _fill_batch([parse_count("--query-lens", word) for word in arguments.query_lens.split(",")], context)
    if arguments.decodes is not None:
        return _fill_batch([1] * parse_count("--decodes", arguments.decodes), context)
    lengths = list(usual.query_lens)
    if not usual.prefill_tokens and arguments.requests is None:
        return _fill_batch([1] * parse_count("--tokens", arguments.tokens or str(len(lengths))), context)
    tokens = sum(lengths) if arguments.tokens is None else parse_count("--tokens", arguments.tokens)
    if arguments.requests is not None:
        lengths = [1] * parse_count("--requests", arguments.requests)
        if len(lengths) > tokens:
            raise ConfigError(f"--requests is {len(lengths)}, but there are {tokens} tokens to share.")
    return resize_batch(replace(_fill_batch(lengths, context), prefill_tokens=tokens), tokens)


def _fill_batch(lengths: Sequence[int], context: int) -> Batch:
    prefill = sum(length for length in lengths if length > 1)
    if len(lengths) > MAX_REQUESTS or sum(lengths) > MAX_TOKENS:
        raise ConfigError(
            f"a step of {len(lengths)} requests and {sum(lengths)} tokens is too large: it has at most {MAX_REQUESTS} "
            f"requests and {MAX_TOKENS} tokens."
        )
    return Batch(tuple(lengths), prefill, context_lens=(context,) * len(lengths))


def parse_count(name: str, text: str, least: int = 1) -> int:
    """Return the whole number that was given for the argument *name*.

    Raises:
        ConfigError: the text is no such number, or is out of range.
    """
    number = read_count(text.strip())
    if number is None or not least <= number <= MAX_TOKENS:
        raise ConfigError(f"{name} has {text[:100]!r}; it takes whole numbers from {least} to {MAX_TOKENS}.")
    return number
