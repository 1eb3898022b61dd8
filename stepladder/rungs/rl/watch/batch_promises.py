"""Promises that are checked on every batch, or at the first updates, because nothing else would notice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import compress

import torch

from stepladder.errors import InvariantError
from stepladder.policies.policy import Policy
from stepladder.rungs.rl.watch.canary import policy_fingerprint
from stepladder.types import Group, TrainingSample


def check_masks(samples: Sequence[TrainingSample], groups: Sequence[Group]) -> None:
    """What is trained is what was sampled: the masked ids of a trajectory are its turns' ids, in order.

    Raises InvariantError saying whether the mask is inverted, shifted, or something else.
    """
    trained: dict[str, list[int]] = {}
    others: dict[str, list[int]] = {}
    for sample in samples:
        ids, mask = sample.token_ids, sample.mask
        trained.setdefault(sample.trajectory_id, []).extend(compress(ids, mask))
        others.setdefault(sample.trajectory_id, []).extend(compress(ids, (not m for m in mask)))
    for group in groups:
        for t in group.trajectories:
            if t.id not in trained:
                continue
            sampled = [token for turn in t.turns for token in turn.token_ids]
            got = trained[t.id]
            if got == sampled:
                continue
            raise InvariantError(
                f"the mask of trajectory {t.id} is wrong: {_how(got, others[t.id], sampled)}. It marks "
                f"{len(got)} tokens as trained; the policy sampled {len(sampled)}. Cause: a mask that does "
                "not "
                "follow from who wrote the tokens; nothing was trained on it"
            )


def _how(got: Sequence[int], rest: Sequence[int], sampled: Sequence[int]) -> str:
    if len(got) != len(sampled) and _within(sampled, rest):
        return "it is inverted, False on the sampled tokens and True on the others"
    if len(got) == len(sampled):
        return "it is shifted or permuted, right in number and wrong in place"
    return "it marks other tokens than the sampled ones"


def _within(part: Sequence[int], whole: Sequence[int]) -> bool:
    """Is `part` a subsequence of `whole`?"""
    rest = iter(whole)
    return all(token in rest for token in part)


class ReferenceGuard:
    """The reference stays what it was while the policy moves. Watched over the first updates.

    Raises InvariantError at once where the two share storage, and in `check` where the reference follows.
    """

    def __init__(self, policy: Policy, reference: Policy, *, updates: int = 2) -> None:
        self.policy, self.reference = policy, reference
        self.left = updates
        self.apart = False  # do policy and reference differ since the last update?
        self.began = policy_fingerprint(reference, reference.dtype)
        mine = {p.data_ptr() for p in policy.model.parameters()}
        shared = [n for n, p in reference.model.named_parameters() if p.data_ptr() in mine]
        if shared:
            raise InvariantError(
                f"the reference is the trained policy: they share the storage of {len(shared)} weights "
                f"({shared[0]}, ...), so the KL term would stay 0. Use a copy of the policy, made before "
                "training"
            )

    def check(self, metrics: Mapping[str, float]) -> None:
        """After an update. metrics: of that update; `kl` was measured before it."""
        if not self.left or not metrics.get("updated"):
            return
        self.left -= 1
        measured = [metrics[key] for key in ("kl", "kl_reward") if key in metrics]
        if self.apart and 0.0 in measured and self.policy.dtype == torch.float32:
            raise InvariantError(
                "the reference is the trained policy: the policy has moved since RL began, and yet the KL of "
                "every token is exactly 0. The reference's log-probabilities are taken from the policy"
            )
        now = policy_fingerprint(self.reference, self.reference.dtype)
        trained = policy_fingerprint(self.policy, self.reference.dtype)
        if now != self.began:
            what = "is the trained policy: it moved with it" if now == trained else "is written to"
            raise InvariantError(
                f"the reference {what} during an update, so the KL term would be measured from a moving "
                "point; "
                "keep a frozen copy of the policy, made before training"
            )
        self.apart = trained != self.began
