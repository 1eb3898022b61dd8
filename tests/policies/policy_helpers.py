"""A tokenizer of its own for tests: one token per word, with special tokens and a chat template."""

from __future__ import annotations

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

WORDS = ["<unk>", "<s>", "</s>", "<end>", *"abcdefghijklmnopqrstuvwxyz"]
TEMPLATE = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} <end>{% endfor %}"


def word_tokenizer() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer
