"""The section of preference optimisation."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from stepladder.recipe.section import Names, RungSection

Loss = Literal["dpo", "cdpo", "robust", "ipo", "simpo", "kto", "orpo"]

EARLIER_RUNG = "rejection_sampling"
"""As `data`: the pairs that this rung of the same run wrote."""

# Which keys a loss has; any other of them is refused, so that none is given in vain.
TAKES: dict[str, tuple[str, ...]] = {
    "dpo": ("per_token", "sft_weight"),
    "cdpo": ("label_smoothing", "per_token", "sft_weight"),
    "robust": ("label_smoothing", "sft_weight"),
    "ipo": ("per_token", "sft_weight"),
    "simpo": ("gamma", "gamma_beta_ratio", "sft_weight"),
    "kto": ("desirable_weight", "undesirable_weight"),
    "orpo": (),
}
WITHOUT_REFERENCE = ("simpo", "orpo")


class PreferenceSection(RungSection):
    """Preference optimisation: DPO and its relatives on pairs, KTO on single answers."""

    label: ClassVar[str] = "after preference optimisation"
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
    gamma: float | None = Field(None, ge=0, description="simpo's target margin, absolute as in the paper")
    gamma_beta_ratio: float | None = Field(
        None, ge=0, description="simpo's target margin divided by beta, as in its code"
    )
    per_token: bool | None = Field(
        None,
        description="divide log-ratios by the answer's length; unset: true for ipo, false for dpo and cdpo "
        "(simpo and orpo always do)",
    )
    desirable_weight: float | None = Field(None, gt=0, description="of kto's good answers; unset: 1.0")
    undesirable_weight: float | None = Field(None, gt=0, description="of kto's bad answers; unset: 1.0")
    sft_weight: float | None = Field(
        None, gt=0, description="adds this times -log p a token of the chosen answer (RPO); unset: 0"
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
    warmup_steps: int = Field(3, ge=0, description="steps over which the learning rate rises linearly")
    schedule: Literal["constant", "linear"] = Field(
        "constant", description="after the warm-up; linear falls to 0 at the last step of the last epoch"
    )
    validation: int = Field(16, ge=0, description="pairs (kto: answers) held out; 0: no early stop")
    patience: int = Field(1, ge=1, description="epochs without a better validation loss before the stop")
    min_improvement: float = Field(
        0.0005,
        ge=0,
        description="by how much a validation loss must be lower to count for patience; the weights of the "
        "lowest are kept in any case",
    )
    max_grad_norm: float = Field(
        1.0, gt=0, description="gradients with a longer global norm are scaled to it"
    )
    max_prompt_tokens: int | None = Field(
        None, ge=1, description="longer prompts are cut; unset: no limit. The two sides never share a limit"
    )
    max_completion_tokens: int | None = Field(
        None, ge=1, description="longer answers lose their end; unset: no limit"
    )
    keep: Literal["end", "start"] = Field("end", description="which end of a prompt that is cut stays")
    overlong: Literal["cut", "drop"] = Field(
        "cut", description='"drop": rows over a limit are left out, and counted'
    )
    token_budget: int = Field(4096, ge=16, description="distinct tokens a micro-batch")
    max_minutes: float | None = Field(None, gt=0, description="no new epoch begins after this time")

    def wants_environment(self) -> str | None:
        """Return what is asked of it: pairs."""
        return f"preference.pairs={self.pairs} asks an environment for pairs" if self.data is None else None

    @model_validator(mode="after")
    def _consistent(self) -> PreferenceSection:
        if (self.data is None) == (self.pairs == 0):
            raise ValueError(
                f"give either preference.data or preference.pairs; got data={self.data!r} and "
                f"pairs={self.pairs}. Try pairs=64"
            )
        self._refuse_too_few_pairs()
        self._refuse_foreign_keys()
        self._refuse_idle_limits()
        self._refuse_wrong_reference()
        if self.loss == "simpo" and (self.gamma is None) == (self.gamma_beta_ratio is None):
            raise ValueError(
                "simpo needs exactly one of gamma (absolute) and gamma_beta_ratio; got "
                f"gamma={self.gamma} and gamma_beta_ratio={self.gamma_beta_ratio}. Try gamma_beta_ratio=0.5"
            )
        if self.loss == "kto" and self.batch_size < 2:
            raise ValueError(
                f"kto compares each answer with another of its batch, so batch_size={self.batch_size} leaves "
                "nothing to compare; try batch_size=8"
            )
        return self

    def _refuse_too_few_pairs(self) -> None:
        """For kto each pair is two answers to one prompt, and each side of the split needs two prompts."""
        if not self.pairs or not self.validation:
            return
        kto = self.loss == "kto"
        if kto and self.validation < 4:
            raise ValueError(
                f"validation={self.validation} answers are fewer than two pairs, and kto compares answers to "
                "different prompts; try validation = 4, or 0"
            )
        held, least = (self.validation // 2, 2) if kto else (self.validation, 1)
        if self.pairs - held < least:
            works = self.pairs // 5 if not kto else max(4, self.pairs // 5 * 2) if self.pairs >= 4 else 0
            raise ValueError(
                f"pairs={self.pairs} leaves too little to train on, for validation={self.validation} "
                f"{'answers (two a pair)' if kto else 'pairs'} are held back; try validation = {works}"
            )

    def _refuse_foreign_keys(self) -> None:
        for key in dict.fromkeys(key for keys in TAKES.values() for key in keys):
            if getattr(self, key) is not None and key not in TAKES[self.loss]:
                works = [loss for loss, keys in TAKES.items() if key in keys]
                raise ValueError(
                    f"{key}={getattr(self, key)} means nothing to the loss {self.loss!r}; leave it out, or "
                    f"use one of: {', '.join(works)}"
                )

    def _refuse_idle_limits(self) -> None:
        if self.keep == "start" and (self.max_prompt_tokens is None or self.overlong == "drop"):
            raise ValueError(
                'keep="start" says how prompts are cut, but none is; set max_prompt_tokens=512 and '
                'overlong="cut", or leave keep out'
            )
        if self.overlong == "drop" and self.max_prompt_tokens is None and self.max_completion_tokens is None:
            raise ValueError('overlong="drop" drops nothing without a limit; set max_completion_tokens=512')

    def _refuse_wrong_reference(self) -> None:
        free = self.loss in WITHOUT_REFERENCE
        if self.reference is not None and free != (self.reference == "none"):
            has = "has no reference" if free else "is measured from a reference"
            works = '"none", or leave it out' if free else '"start"'
            raise ValueError(
                f"the loss {self.loss!r} {has}, but reference={self.reference!r}; write reference = {works}"
            )

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
        if self.beta is not None:
            return self.beta
        return 2.0 if self.loss == "simpo" else 0.1
