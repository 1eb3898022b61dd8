"""Where the tokens of one pass of the fused engine belong."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from stepladder.engines.local.spans import Span


@dataclass(frozen=True, slots=True)
class PassLayout:
    """Where the N tokens of a pass belong; matrices have `filled` rows, those after the N are nobody's.

    cos, sin [filled, 1, head_dim]; where [N, 2 · kv_heads], flat indices into a layer's cache; last [rows, or
    a few more], each row's last token.
    """

    filled: int
    cos: Tensor
    sin: Tensor
    where: Tensor
    last: Tensor
    spans: tuple[Span, ...]
