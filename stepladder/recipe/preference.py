"""The section of preference optimisation."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from stepladder.recipe.section import EarlyStopKeys, Names, OptimizerKeys, Refusals, RungSection, Section

Loss = Literal["dpo", "cdpo", "robust", "ipo", "simpo", "kto", "orpo"]

EARLIER_RUNG = "rejection_sampling"
"""As `data`: the pairs that this rung of the same run wrote."""

TAKES: dict[str, tuple[str, ...]] = {
    "dpo": ("per_token", "sft_weight"),
    "cdpo": ("label_smoothing", "per_token", "sft_weight"),
    "robust": ("label_smoothing", "sft_weight"),
    "ipo": ("per_token", "sft_weight"),
    "simpo": ("simpo", "sft_weight"),
    "kto": ("kto",),
    "orpo": (),
}
"""Which keys and tables a loss has; any other of them is refused, so that none is given in vain."""
WITHOUT_REFERENCE = ("simpo", "orpo")


class SimpoSection(Section):
    """The target margin of simpo, in one of two units."""

    gamma: float | None = Field(None, ge=0, description="absolute, as in the paper")
    gamma_beta_ratio: float | None = Field(None, ge=0, description="divided by beta, as in its code")


class KtoSection(Section):
    """The weights of kto's two kinds of answers."""

    desirable_weight: float = Field(1.0, gt=0, description="of good answers")
    undesirable_weight: float = Field(1.0, gt=0, description="of bad answers")


class LimitsSection(Section):
    """How long the two sides of a row may be; they never share a limit."""

    max_prompt_tokens: int | None = Field(None, ge=1, description="longer prompts are cut; unset: no limit")
    max_completion_tokens: int | None = Field(
        None, ge=1, description="longer answers lose their end; unset: no limit"
    )
    keep: Literal["end", "start"] = Field("end", description="which end of a prompt that is cut stays")
    overlong: Literal["cut", "drop"] = Field(
        "cut", description='"drop": rows over a limit are left out, and counted'
    )

    refusals: ClassVar[Refusals] = {
        'keep="start" says how prompts are cut, but none is; set max_prompt_tokens=512 and '
        'overlong="cut", or leave keep out': lambda s: (
            s.keep == "start" and (s.max_prompt_tokens is None or s.overlong == "drop")
        ),
        'overlong="drop" drops nothing without a limit; set max_completion_tokens=512': lambda s: (
            s.overlong == "drop" and s.max_prompt_tokens is None and s.max_completion_tokens is None
        ),
    }


class PreferenceSection(OptimizerKeys, EarlyStopKeys, RungSection):
    """Preference optimisation: DPO and its relatives on pairs, KTO on single answers."""

    label: ClassVar[str] = "after preference optimisation"
    wish: ClassVar[str] = "preference.pairs={s.pairs} asks an environment for pairs"
    writes: ClassVar[tuple[str, ...]] = ("reference_logprobs.safetensors",)

    pairs: int = Field(0, ge=0, description="made by the environment; 0 with `data`")
    data: Annotated[str | None, Names("file", but=(EARLIER_RUNG,))] = Field(
        None,
        description="a file of preferences (for kto: or of answers with a label), or "
        '"rejection_sampling": the pairs that this rung of the same run wrote',
    )
    loss: Loss = Field("dpo", description="what is minimised; each has a page under algorithms")
    beta: float | None = Field(
        None,
        gt=0,
        description="how strongly the policy is held to the reference (dpo, cdpo, robust, kto), ipo's tau, "
        "the scale of simpo, the weight of the odds ratio in orpo; unset: 2.0 for simpo, else 0.1",
    )
    label_smoothing: float | None = Field(
        None, ge=0, lt=0.5, description="share of labels taken to be flipped (cdpo, robust); unset: 0.1"
    )
    per_token: bool | None = Field(
        None,
        description="divide log-ratios by the answer's length; unset: true for ipo, false for dpo and cdpo "
        "(simpo and orpo always do)",
    )
    sft_weight: float | None = Field(
        None, gt=0, description="adds this times -log p per token of the chosen answer (RPO); unset: 0"
    )
    reference: Literal["start", "base", "none"] | None = Field(
        None,
        description='start: the policy as this rung began; base: the model without its adapter; "none" is '
        "what simpo and orpo have, and they alone; unset: start, or none for those two",
    )
    epochs: int = Field(1, ge=1, description="at most; early stop comes first")
    batch_size: int = Field(16, ge=1, description="pairs (kto: answers) per optimiser step")
    learning_rate: float = Field(
        1e-6,
        gt=0,
        description="of AdamW, after the warm-up; ten times that with an adapter. One that is too high "
        "shows in drift_chosen, not in the validation",
    )
    schedule: Literal["constant", "linear"] = Field(
        "constant", description="after the warm-up; linear falls to 0 at the last step of the last epoch"
    )
    validation: int = Field(16, ge=0, description="pairs (kto: answers) held out; 0: no early stop")
    min_improvement: float = Field(
        0.0005, ge=0, description="by how much a validation loss must be lower to count for patience"
    )
    limits: LimitsSection = LimitsSection()
    simpo: SimpoSection | None = None
    kto: KtoSection | None = None

    refusals: ClassVar[Refusals] = {
        "give either preference.data or preference.pairs; got data={s.data!r} and pairs={s.pairs}. Try "
        "pairs=64": lambda s: (s.data is None) == (s.pairs == 0),
        "validation={s.validation} answers are fewer than two pairs, and kto compares answers to "
        "different prompts; try validation = 4, or 0": lambda s: (
            s.pairs and s.loss == "kto" and 0 < s.validation < 4
        ),
        "pairs={s.pairs} leaves too little to train on, for validation={s.validation} {s.unit} "
        "are held back; try validation = {s.fewer}": lambda s: (
            s.pairs and s.validation and s.pairs - s.held < (2 if s.loss == "kto" else 1)
        ),
        "{s.in_vain[0]}={s.in_vain[1]!r} means nothing to the loss {s.loss!r}; leave it out, or use one "
        "of: {s.in_vain[2]}": lambda s: s.in_vain,
        "the loss {s.loss!r} has no reference, but reference={s.reference!r}; write reference = "
        '"none", or leave it out': lambda s: (
            s.loss in WITHOUT_REFERENCE and s.reference not in (None, "none")
        ),
        "the loss {s.loss!r} is measured from a reference, but reference={s.reference!r}; write "
        'reference = "start"': lambda s: s.loss not in WITHOUT_REFERENCE and s.reference == "none",
        "simpo needs exactly one of simpo.gamma (absolute) and simpo.gamma_beta_ratio; got "
        "gamma={s.margin.gamma} and gamma_beta_ratio={s.margin.gamma_beta_ratio}. Try "
        "preference.simpo.gamma_beta_ratio=0.5": lambda s: (
            s.loss == "simpo" and (s.margin.gamma is None) == (s.margin.gamma_beta_ratio is None)
        ),
        "kto compares each answer with another of its batch, so batch_size={s.batch_size} leaves "
        "nothing to compare; try batch_size=8": lambda s: s.loss == "kto" and s.batch_size < 2,
    }

    @property
    def unit(self) -> str:
        """What `validation` counts."""
        return "answers (two per pair)" if self.loss == "kto" else "pairs"

    @property
    def held(self) -> int:
        """The pairs that `validation` holds back. For kto each pair is two answers to one prompt."""
        return self.validation // 2 if self.loss == "kto" else self.validation

    @property
    def fewer(self) -> int:
        """A `validation` that leaves enough to train on: kto needs two prompts on each side of the split."""
        if self.loss != "kto":
            return self.pairs // 5
        return max(4, self.pairs // 5 * 2) if self.pairs >= 4 else 0

    @property
    def in_vain(self) -> tuple[str, Any, str] | None:
        """A key or table that is given and means nothing to the loss: its name, its value, what uses it."""
        for key in dict.fromkeys(key for keys in TAKES.values() for key in keys):
            if getattr(self, key) is not None and key not in TAKES[self.loss]:
                return key, getattr(self, key), ", ".join(loss for loss, keys in TAKES.items() if key in keys)
        return None

    @property
    def resolved_reference(self) -> str:
        """ "start", "base" or "none"."""
        return self.reference or ("none" if self.loss in WITHOUT_REFERENCE else "start")

    @property
    def kind(self) -> Literal["preference", "unpaired"]:
        """What the rows of `data` are."""
        return "unpaired" if self.loss == "kto" else "preference"

    @property
    def resolved_beta(self) -> float:
        """The recipe's, or what is usual for the loss."""
        return self.beta or (2.0 if self.loss == "simpo" else 0.1)

    @property
    def margin(self) -> SimpoSection:
        """What [preference.simpo] says, where it says something."""
        return self.simpo or SimpoSection()

    @property
    def weights(self) -> KtoSection:
        """What [preference.kto] says, or its defaults."""
        return self.kto or KtoSection()
