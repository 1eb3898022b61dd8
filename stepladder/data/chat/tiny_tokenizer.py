"""A tokenizer built in code, one token per character, for models trained from scratch on small worlds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from stepladder.data.chat.control import Tokenizer
from stepladder.data.chat.tool_template import mark
from stepladder.errors import ConfigError

HIDDEN_DIGIT = ("0", "1", "2", "3", "4", "5", "6", "7", "8", "9", "S", "?")
ASCII = tuple("\n" + "".join(map(chr, range(32, 127))))
_CONTROL = ("<|pad|>", "<|bos|>", "<|unk|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>")

# A message is its role's marker, its text, and <|end|>, which is also the end-of-sequence token.
_TEMPLATE = """{{- bos_token -}}
{%- for message in messages -%}
{%- if message.role not in ['system', 'user', 'assistant', 'tool'] -%}
{{- raise_exception('unknown role ' ~ message.role) -}}
{%- endif -%}
{{- '<|' ~ message.role ~ '|>' ~ message.content ~ '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"""


def tiny_tokenizer(*symbols: str, tools: bool | None = None) -> Tokenizer:
    """A `PreTrainedTokenizerFast` over single characters and chat markers.

    `symbols`: the characters it knows (default: printable ASCII and the line break); another character
    becomes <|unk|>. `tools=False`: its chat template never shows tools, which is right for an alphabet that
    cannot spell them, and the default where "{" is missing.

    >>> tokenizer = tiny_tokenizer(*HIDDEN_DIGIT)
    >>> tokenizer.decode(tokenizer.encode("S4?"))
    'S4?'

    Raises `ConfigError` for a symbol that is not one character.
    """
    import transformers  # takes seconds to import

    alphabet = _checked(symbols or ASCII)
    vocabulary = {text: index for index, text in enumerate((*_CONTROL, *alphabet))}
    backend = Backend(models.WordLevel(vocabulary, unk_token="<|unk|>"))  # noqa: S106
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    make: Any = transformers.PreTrainedTokenizerFast  # untyped
    tokenizer = make(
        tokenizer_object=backend,
        bos_token="<|bos|>",  # noqa: S106
        eos_token="<|end|>",  # noqa: S106
        pad_token="<|pad|>",  # noqa: S106
        unk_token="<|unk|>",  # noqa: S106
        additional_special_tokens=list(_CONTROL[3:7]),
        clean_up_tokenization_spaces=False,
    )
    shows_tools = "{" in alphabet if tools is None else tools
    tokenizer.chat_template = _TEMPLATE if shows_tools else mark("none") + _TEMPLATE
    return tokenizer


def _checked(symbols: Iterable[str]) -> list[str]:
    unique = list(dict.fromkeys(symbols))
    for symbol in unique:
        if len(symbol) != 1:
            raise ConfigError(f"a symbol of the tiny tokenizer is one character, such as 'S'; got {symbol!r}")
    return unique
