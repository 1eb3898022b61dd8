"""The weight-sync canary: after every sync, the engine holds the weights that the trainer has.

Three proofs, on a few dozen tokens and one reading of the weights: the engine's version; its fingerprint,
which moves exactly when the weights, rounded to the engine's type, have moved; and the log-probabilities of
fixed tokens on both sides, which differ by no more than they did when the run began.
"""

from __future__ import annotations

import torch

from stepladder.data.batching import whole_sample
from stepladder.engines.engine import PolicyEngine
from stepladder.engines.weights import WeightHash
from stepladder.errors import InvariantError
from stepladder.policies.policy import Policy
from stepladder.rungs.rl.watch.mismatch_cause import cause_of_mismatch
from stepladder.types import TrainingSample


class Canary:
    """A row of fixed random tokens, scored by both sides. Made when both are known to be in step.

    Raises InvariantError, there and in `check`, with the cause that was found.
    """

    def __init__(self, policy: Policy, engine: PolicyEngine, *, length: int = 64):
        self.policy, self.engine = policy, engine
        self.exact = engine.in_process and engine.dtype == policy.dtype == torch.float32
        self.samples = [fixed_sample(policy, min(length, engine.max_context - 1))]
        self.held = engine.weights_fingerprint()
        self.trained = policy_fingerprint(policy, engine.dtype)
        self.calibrated = self._mismatch()
        limit = 1e-3 if self.exact else 0.25
        if not self.calibrated <= limit:
            raise InvariantError(
                "engine and trainer disagree before any training: on fixed tokens their log-probabilities "
                f"differ by {self.calibrated:.3g} nats a token (allowed: {limit:g}). {self._cause()}"
            )

    @property
    def allowed(self) -> float:
        """Nats a token: four times what the two computations differed by at the start, and no less than what
        rounding alone can give."""
        return max(4 * self.calibrated, 1e-4 if self.exact else 0.05)

    def check(self, version: int) -> float:
        """Prove a sync to `version`; returns the mismatch in nats a token."""
        if self.engine.version != version:
            raise InvariantError(
                f"the weight sync did not arrive: the engine is at version {self.engine.version}, the "
                "trainer "
                f"at {version}"
            )
        held = self.engine.weights_fingerprint()
        trained = policy_fingerprint(self.policy, self.engine.dtype)
        moved, followed = trained != self.trained, held != self.held
        self.held, self.trained = held, trained
        if moved and not followed:
            raise InvariantError(
                f"the weight sync did not arrive: the engine says version {version}, but its weights are, "
                "bit "
                "for bit, those of the version before, and the update changed the trainer's"
            )
        if followed and not moved:
            raise InvariantError(
                f"the engine's weights changed at the sync to version {version} although the trainer's did "
                "not: something else writes to them"
            )
        mismatch = self._mismatch()
        if not mismatch <= self.allowed:
            raise InvariantError(
                f"after the sync to version {version} engine and trainer differ by {mismatch:.3g} nats a "
                "token "
                f"on fixed tokens (at the start {self.calibrated:.3g}, allowed {self.allowed:.3g}). "
                f"{self._cause()}"
            )
        return mismatch

    @torch.no_grad()
    def _mismatch(self) -> float:
        """Mean |difference| over all fixed tokens, at temperature 1."""
        mine = self.policy.logprobs(self.samples).logprobs
        total, tokens = 0.0, 0
        for b, sample in enumerate(self.samples):
            theirs = torch.tensor(self.engine.token_logprobs(sample.token_ids), device=mine.device)
            total += float((mine[b, 1 : len(sample.token_ids)] - theirs).abs().sum())
            tokens += len(theirs)
        return total / tokens

    def _cause(self) -> str:
        return cause_of_mismatch(self.policy, self.engine, self.samples, temperature=1.0)


def fixed_sample(policy: Policy, length: int) -> TrainingSample:
    """Random token ids, the same in every run of a model; no special tokens."""
    vocabulary = policy.lm.get_input_embeddings().weight.shape[0]
    special = set(policy.tokenizer.all_special_ids)
    usable = torch.tensor([i for i in range(min(vocabulary, len(policy.tokenizer))) if i not in special])
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(0, len(usable), (length,), generator=generator)
    return whole_sample(tuple(usable[drawn].tolist()), "canary")


@torch.no_grad()
def policy_fingerprint(policy: Policy, dtype: torch.dtype) -> str:
    """A hash of the policy's weights as an engine of type `dtype` would hold them."""
    seen = WeightHash()
    for parameter in policy.model.parameters():
        seen.add(parameter.to(dtype) if parameter.is_floating_point() else parameter)
    return seen.digest()
