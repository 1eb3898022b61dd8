"""The section of supervised fine-tuning."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from stepladder.recipe.fitting import FittingSection
from stepladder.recipe.section import Names, Refusals


class SftSection(FittingSection):
    """Supervised fine-tuning on demonstrations, until the validation loss stops falling."""

    label: ClassVar[str] = "after the warm start (SFT)"
    wish: ClassVar[str] = "sft.demonstrations={s.demonstrations} asks an environment for demonstrations"

    epochs: int = Field(
        10,
        ge=0,
        description="at most; early stop comes first. 0: no fine-tuning, the rows are there for rl.replay",
    )
    demonstrations: int = Field(0, ge=0, description="made by the environment; 0 with `data`")
    data: Annotated[str | None, Names("file")] = Field(
        None, description="rows: a file, folder or glob; docs/data.md lists formats"
    )
    train: Literal["assistant", "completion", "last_turn", "full"] = Field(
        "assistant",
        description="what is imitated: every assistant turn (after the prompt, where rows have one), all "
        "that follows the prompt, the last assistant turn only, or every token",
    )
    max_tokens: int | None = Field(None, ge=2, description="of a sample; see overlong. Without it, no limit")
    overlong: Literal["drop", "cut"] = Field(
        "drop",
        description="rows over max_tokens: left out, or cut at their end (texts: split); counted either way",
    )
    validation: int = Field(16, ge=0, description="rows held out, chosen by their content; 0: no early stop")

    refusals: ClassVar[Refusals] = {
        "give either sft.data or sft.demonstrations; got data={s.data!r} and demonstrations="
        "{s.demonstrations}. Try demonstrations=32": lambda s: (s.data is None) == (s.demonstrations == 0),
        'sft.overlong="cut" cuts nothing without a limit; try sft.max_tokens = 1024': lambda s: (
            s.overlong == "cut" and s.max_tokens is None
        ),
    }
