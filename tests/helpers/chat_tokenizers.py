"""Tokenizers made in code for tests: a byte-level BPE with the control tokens that a chat template names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# The same for content in parts: an image becomes <image>.
PICTURES = CHATML.replace(
    "m['content']",
    "(m['content'] if m['content'] is string "
    "else m['content'] | map(attribute='text', default='<image>') | join)",
)

_CORPUS = """The tool said: 4. Because the answer is four, the search is over.\n\n{"name": "add", "arguments":
{"a": 1, "b": 2}}\n\nuser\nassistant\nsystem\n\n\nYou are a helpful assistant. What is 2 + 2?\n"""

_SPECIAL = re.compile(
    r"<\|[A-Za-z_]+\|?>|<[A-Za-z_]+\|>|<｜[^｜<>]+｜>|\[gMASK\]|<sop>|</s>|<image>|"
    r"<(?:start|end)_of_(?:turn|utterance|image)>"
)
_STRUCTURAL = re.compile(r"</?(?:think|tool_call|tool_response|arg_key|arg_value)>")


def tokens_named_in(template: str) -> tuple[list[str], list[str]]:
    """(special, not special but added) tokens of a template's own text."""
    return sorted(set(_SPECIAL.findall(template))), sorted(set(_STRUCTURAL.findall(template)))


def bpe_tokenizer(
    template: str,
    special: Sequence[str] = (),
    structural: Sequence[str] = (),
    *,
    eos: str = "<eos>",
    bos: str = "<bos>",
    tokens: Sequence[AddedToken] = (),
) -> Any:
    """A byte-level BPE with a few merges (so that text boundaries matter) and these control tokens."""
    backend = Tokenizer(models.BPE())
    # Words as Llama 3 and Qwen cut them: line breaks stay together.
    words = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(words, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator([_CORPUS], trainer)
    backend.add_tokens([AddedToken(t, special=False, normalized=False) for t in structural])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=bos,
        eos_token=eos,
        additional_special_tokens=[t for t in special if t not in (bos, eos)],
    )
    tokenizer.add_tokens(list(tokens))
    tokenizer.chat_template = template
    return tokenizer


def tokenizer_for(template: str, *, eos: str = "<eos>") -> Any:
    """A tokenizer with the control tokens that `template` names."""
    special, structural = tokens_named_in(template)
    return bpe_tokenizer(template, special, structural, eos=eos)
