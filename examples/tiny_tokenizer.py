"""The tokenizer of the tiny DeepSeek, one token per byte, and tasks as its tokens."""

from __future__ import annotations

import torch
from tiny_tasks import Task
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor
from transformers import PreTrainedTokenizerFast

BOS, EOS, PAD = "<s>", "</s>", "<pad>"
IGNORED = -100  # target of a position without loss


def build_tokenizer(context: int) -> PreTrainedTokenizerFast:
    """Build a tokenizer with one token per byte that puts ``<s>`` before texts of up to *context* tokens."""
    special = [BOS, EOS, PAD]
    tokens = special + sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    tokenizer.add_special_tokens(special)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, pad_token=PAD, model_max_length=context
    )


def encode(tokenizer: PreTrainedTokenizerFast, tasks: list[Task]) -> tuple[Tensor, Tensor]:
    """Turn tasks into inputs and targets, each [tasks, positions]; only the answer and its end have targets."""
    texts = [task.prompt + task.answer + EOS for task in tasks]
    tokens = tokenizer(texts, padding=True, return_tensors="pt").input_ids
    prompt_length = torch.tensor([len(task.prompt) for task in tasks])[:, None]
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    in_prompt = torch.arange(targets.shape[1]) < prompt_length
    return inputs, targets.masked_fill(in_prompt | (targets == tokenizer.pad_token_id), IGNORED)
