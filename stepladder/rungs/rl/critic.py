"""The critic of a run: what it says about a batch, and how it learns from it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from stepladder.data.batching import micro_batches
from stepladder.objectives.critic import value_loss
from stepladder.objectives.reduce import aggregate, step_denominators
from stepladder.policies.heads import ValueModel
from stepladder.policies.optimizer import MasterOptimizer
from stepladder.policies.policy import Policy
from stepladder.recipe.rl_credit import CriticSection
from stepladder.rungs.accumulate import Metrics, PartLoss, accumulate, take_step
from stepladder.rungs.rl.update import RlBatch

PREFIX = "critic/"  # of its tensors in a checkpoint


class Critic:
    """A value model with the numbers it learns by. Shared, its parameters are in the policy's optimiser."""

    def __init__(
        self, policy: Policy, settings: CriticSection, *, token_budget: int, max_grad_norm: float
    ) -> None:
        self.settings, self.token_budget = settings, token_budget
        self.shared = settings.trunk == "shared"
        self.model: ValueModel = ValueModel(policy) if self.shared else ValueModel.own_trunk(policy)
        self.optimizer: MasterOptimizer | None = None
        if not self.shared:
            self.optimizer = MasterOptimizer(self.model.trainable(), max_grad_norm=max_grad_norm)

    @torch.no_grad()
    def judge(self, batch: RlBatch) -> tuple[Tensor, Tensor]:
        """(values [n, T] before each trained token, the value [N] of the state each trajectory ended in)."""
        samples = batch.samples
        values = torch.zeros(len(samples), max(len(s.token_ids) for s in samples))
        ends = torch.zeros(int(batch.trajectory_index.max()) + 1)
        for rows in micro_batches(samples, self.token_budget):
            chunk = [samples[i] for i in rows]
            trained = [[t for t, on in enumerate(s.mask) if on] for s in chunk]
            asked = [[*(t - 1 for t in at), len(s.token_ids) - 1] for at, s in zip(trained, chunk)]
            said, _ = self.model.at(chunk, asked)
            pieces = torch.split(said.float().cpu(), [len(at) for at in asked])
            for i, at, piece in zip(rows, trained, pieces):
                values[i, at] = piece[:-1]
                ends[int(batch.trajectory_index[i])] = piece[-1]  # rows stand in order, so the last one's
        return values, ends

    def update(self, batch: RlBatch, *, rate: float, token_budget: int | None = None) -> Metrics:
        """One step of a critic with a trunk of its own on the returns of `batch`."""
        assert self.optimizer is not None
        also = self.loss(batch, coefficient=1.0)
        metrics = accumulate(micro_batches(batch.samples, token_budget or self.token_budget), also)
        norm = take_step(self.optimizer, rate)
        kept = {n: v for n, v in metrics.items() if n not in ("tokens", "tokens_computed", "loss")}
        return {**kept, "value_loss": metrics["loss"], "critic_grad_norm": norm}

    def loss(self, batch: RlBatch, *, coefficient: float) -> PartLoss:
        """Return the loss of rows of `batch`: `coefficient` times the token mean of the value loss."""
        assert batch.values is not None
        assert batch.returns is not None
        old, returns = batch.values, batch.returns
        lengths = torch.tensor([s.num_trained for s in batch.samples])
        denominators = step_denominators(lengths, mode="token_mean")

        def of(rows: list[int]) -> tuple[Tensor, dict[str, Tensor], int]:
            samples = [batch.samples[i] for i in rows]
            values = self.model.token_values(samples)
            width = values.shape[1]
            mask = torch.zeros(values.shape, dtype=torch.bool)
            for b, sample in enumerate(samples):
                mask[b, : len(sample.mask)] = torch.tensor(sample.mask)
            mask = mask.to(values.device)
            losses, metrics = value_loss(
                values,
                old[rows, :width].to(values.device),
                returns[rows, :width].to(values.device),
                mask,
                clip=self.settings.value_clip or None,
            )
            total = aggregate(losses, mask, denominators[rows].to(losses.device))
            metrics.pop("explained_variance")  # of a part of the step; `explained` is that of the whole
            return coefficient * total, metrics, 0

        return of

    def tensors(self) -> dict[str, Tensor]:
        """Weights and moments for a checkpoint; of a shared critic they are among the policy's."""
        own = self.optimizer.tensors() if self.optimizer is not None else {}
        return {f"{PREFIX}{name}": tensor for name, tensor in own.items()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        if self.optimizer is not None:
            own = {n.removeprefix(PREFIX): t for n, t in tensors.items() if n.startswith(PREFIX)}
            self.optimizer.load(own)

    def close(self) -> None:
        if self.optimizer is not None:
            self.optimizer.close()


def explained_variance(batch: RlBatch) -> float:
    """1 - mean (R - V)² / Var R over the trained tokens of the step: how much the critic knew beforehand."""
    assert batch.values is not None
    assert batch.returns is not None
    mask = torch.zeros(batch.values.shape, dtype=torch.bool)
    for b, sample in enumerate(batch.samples):
        mask[b, : len(sample.mask)] = torch.tensor(sample.mask)
    return float(value_loss(batch.values, batch.values, batch.returns, mask)[1]["explained_variance"])
