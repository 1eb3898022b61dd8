"""One number for each state of a language model: a linear head on its body's hidden states.

    ScoredModel    one score per sample, read at its last token (reward models)
    ValueModel     one value per trained token, read just before it (critics)

Both run in the policy's layout (packed with shared prefixes, padded, full), which changes nothing beyond
float noise. The head is float32 whatever the body computes in: a reward of 12.3 has no bf16 neighbour
closer than 0.06.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stepladder.errors import DataError
from stepladder.policies.optimizer import trainable
from stepladder.policies.policy import Policy
from stepladder.types import TrainingSample


class ScalarHead(nn.Linear):
    """w·h, without bias, as in transformers' `ForSequenceClassification` with one label.

    `scale` is the standard deviation of the initial weights; 0 makes every state worth 0 at first. The
    draw depends on `seed` alone.
    """

    def __init__(self, hidden_size: int, *, scale: float = 0.0, seed: int = 0) -> None:
        super().__init__(hidden_size, 1, bias=False, dtype=torch.float32)
        with torch.no_grad():
            generator = torch.Generator().manual_seed(seed)
            self.weight.copy_(scale * torch.randn(1, hidden_size, generator=generator))

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., d] in any float type to [...] in float32."""
        return super().forward(hidden.float()).squeeze(-1)


class HeadedModel(nn.Module):
    """A policy's body with a scalar head on it. `named_parameters` are the body's and the head's.

    `HeadedModel(policy)` shares the policy's weights: one forward and backward serve both. `own_trunk`
    copies them first, so that training one leaves the other as it is.
    """

    def __init__(self, policy: Policy, *, head: ScalarHead | None = None) -> None:
        super().__init__()
        self.policy = policy  # no module: its model is registered below
        self.model: nn.Module = policy.model
        self.score = (head or ScalarHead(policy.hidden_size)).to(policy.device)

    @classmethod
    def own_trunk(cls, policy: Policy, *, head: ScalarHead | None = None) -> Any:
        """On a copy of the policy's weights. An output layer of its own is frozen: no score depends on it."""
        own = Policy(copy.deepcopy(policy.model), policy.tokenizer, mode=policy.mode)
        freeze_output_layer(own)
        return cls(own, head=head)

    @property
    def tokenizer(self) -> Any:
        return self.policy.tokenizer

    def trainable(self) -> dict[str, nn.Parameter]:
        """Parameters that training updates, by name, each shared (tied) tensor once."""
        return trainable(self)

    def at(self, samples: Sequence[TrainingSample], positions: Sequence[Sequence[int]]) -> tuple[Tensor, int]:
        """([n] scores at `positions[b]` of each sample, in order; tokens computed). See Policy.hidden_at."""
        hidden, computed = self.policy.hidden_at(samples, positions)
        return self.score(hidden), computed


class ScoredModel(HeadedModel):
    """A reward model: the head at the last token of a sample is what the sample is worth."""

    def sequence_scores(self, samples: Sequence[TrainingSample]) -> Tensor:
        """[B] float32. Raises DataError for a sample without tokens."""
        return self.scores_and_cost(samples)[0]

    def scores_and_cost(self, samples: Sequence[TrainingSample]) -> tuple[Tensor, int]:
        """([B] scores, tokens that went through the body)."""
        empty = [b for b, sample in enumerate(samples) if not sample.token_ids]
        if empty:
            raise DataError(f"sample {empty[0]} has no tokens, so no last one to score; leave it out")
        return self.at(samples, [[len(sample.token_ids) - 1] for sample in samples])


class ValueModel(HeadedModel):
    """A critic: V(what stood before token t), for every trained token t."""

    def token_values(self, samples: Sequence[TrainingSample]) -> Tensor:
        """[B, T] float32: the head at position t-1 where `mask[b, t]`, 0 elsewhere.

        The value of a prefix does not know the token that the policy chose after it, so it may serve as a
        baseline.
        """
        return self.values_and_cost(samples)[0]

    def values_and_cost(self, samples: Sequence[TrainingSample]) -> tuple[Tensor, int]:
        """(`token_values`, tokens that went through the body)."""
        trained = [[t for t, on in enumerate(sample.mask) if on] for sample in samples]
        values, computed = self.at(samples, [[t - 1 for t in at] for at in trained])
        places = [(b, t) for b, at in enumerate(trained) for t in at]
        index = torch.tensor(places, dtype=torch.long, device=values.device).reshape(-1, 2)
        shape = (len(samples), max(len(sample.token_ids) for sample in samples))
        zeros = torch.zeros(shape, device=values.device)
        return zeros.index_put((index[:, 0], index[:, 1]), values), computed


def freeze_output_layer(policy: Policy) -> None:
    """Leave an untied output layer as it is; where it is the input embedding too, that is still trained."""
    output, inputs = policy.lm.get_output_embeddings(), policy.lm.get_input_embeddings()
    if output is not None and output.weight is not inputs.weight:
        output.requires_grad_(False)
