"""The algorithms as one table of pure data: they differ in a few columns. Imports no torch.

A row names parts of `stepladder.objectives`; the training loop looks them up. To make an algorithm of your
own, `dataclasses.replace` a row."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class Algorithm:
    """One row: what is the advantage, what is the ratio, how it is clipped, how token losses become one
    number.

    Example: ALGORITHMS["dapo"].clip_high == 0.28 and ALGORITHMS["dapo"].aggregation == "token_mean".
    """

    name: str
    advantage: Literal["constant", "group", "batch_whiten", "gae"]
    """constant: R − b · group: `group_advantages` · batch_whiten: token returns, whitened over the batch ·
    gae: critic"""
    baseline: Literal["mean", "leave_one_out", "none"] = "none"
    """Of the group, for the advantage "group" (and, before whitening, "batch_whiten")."""
    scale: Literal["group_std", "batch_std", "none"] = "none"
    ddof: int = 1
    surrogate: Literal["reinforce", "clip", "cispo"] = "clip"
    """A key of `objectives.policy_gradient.SURROGATES`."""
    ratio_level: Literal["token", "sequence", "product"] = "token"
    sequence: Literal["trajectory", "turn"] = "trajectory"
    """What one sequence is for ratios, lengths and denominators: a whole episode, or each turn by itself."""
    clip_low: float | None = 0.2
    clip_high: float | None = 0.2
    clip_absolute: bool = False
    """CISPO only: clip_high is the cap itself instead of the distance from 1."""
    dual_clip: float | None = None
    aggregation: Literal["token_mean", "sequence_mean", "constant", "sequence_sum", "group_token_mean"]
    kl_in: Literal["none", "loss", "reward"] = "none"
    """Exactly one place: a KL term in the reward and in the loss would be charged twice."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    kl_coefficient: float = 0.0
    needs_critic: bool = False
    whiten: bool = False
    """Advantages over the tokens of the batch to mean 0 and deviation 1, last of all."""
    dynamic_sampling: bool = False
    """Groups whose members all earn the same are dropped and others played instead."""
    overlong_penalty: float = 0.0
    """Taken from the score of an episode whose longest turn reaches its limit, less of it just below."""
    paper: str
    note: str = ""


_ROWS = (
    Algorithm(
        name="reinforce",
        advantage="constant",
        surrogate="reinforce",
        clip_low=None,
        clip_high=None,
        aggregation="sequence_sum",
        paper="Williams 1992",
        note="exact policy gradient with a fixed baseline",
    ),
    Algorithm(
        name="rloo",
        advantage="group",
        baseline="leave_one_out",
        ratio_level="product",
        aggregation="sequence_sum",
        kl_in="reward",
        kl_estimator="k1",
        kl_coefficient=0.03,
        paper="arXiv:2402.14740",
        note="the completion is one action; the clip matters only when a batch is reused (TRL .2)",
    ),
    Algorithm(
        name="reinforce++",
        advantage="batch_whiten",
        aggregation="token_mean",
        kl_in="reward",
        kl_estimator="k1",
        kl_coefficient=0.01,
        paper="arXiv:2501.03262",
    ),
    Algorithm(
        name="reinforce++-baseline",
        advantage="batch_whiten",
        baseline="mean",
        aggregation="token_mean",
        kl_in="loss",
        kl_estimator="k2",
        kl_coefficient=0.01,
        paper="arXiv:2501.03262",
    ),
    Algorithm(
        name="ppo",
        advantage="gae",
        aggregation="token_mean",
        kl_in="reward",
        kl_estimator="k1",
        kl_coefficient=0.02,
        needs_critic=True,
        whiten=True,
        paper="arXiv:1707.06347",
        note="KL coefficient of InstructGPT (arXiv:2203.02155)",
    ),
    Algorithm(
        name="grpo",
        advantage="group",
        baseline="mean",
        scale="group_std",
        aggregation="sequence_mean",
        kl_in="loss",
        kl_estimator="k3",
        kl_coefficient=0.04,
        paper="arXiv:2402.03300",
    ),
    Algorithm(
        name="dr_grpo",
        advantage="group",
        baseline="mean",
        aggregation="constant",
        paper="arXiv:2503.20783",
    ),
    Algorithm(
        name="dapo",
        advantage="group",
        baseline="mean",
        scale="group_std",
        clip_high=0.28,
        aggregation="token_mean",
        dynamic_sampling=True,
        overlong_penalty=1.0,
        paper="arXiv:2503.14476",
        note="the paper's equation is group_token_mean; its implementations and this row use the whole step",
    ),
    Algorithm(
        name="gspo",
        advantage="group",
        baseline="mean",
        scale="group_std",
        ratio_level="sequence",
        clip_low=3e-4,
        clip_high=4e-4,
        aggregation="sequence_mean",
        paper="arXiv:2507.18071",
    ),
    Algorithm(
        name="cispo",
        advantage="group",
        baseline="mean",
        scale="group_std",
        surrogate="cispo",
        clip_low=None,
        clip_high=0.28,
        aggregation="token_mean",
        paper="arXiv:2506.13585",
        note="the paper tunes the upper cap and gives no number; .28 is DAPO's",
    ),
)

ALGORITHMS: dict[str, Algorithm] = {row.name: row for row in _ROWS}
"""The table by name."""
