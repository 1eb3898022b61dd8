"""stepladder's side of vs_trl.py: the update functions of the rungs, on token ids from a file."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from resident import peak
from roofline import Cost, measure_roof
from vs_trl_common import Row, kto_rows, options, read, report

from stepladder.policies.heads import ScoredModel
from stepladder.policies.optimizer import MasterOptimizer
from stepladder.policies.policy import Policy
from stepladder.policies.pretrained import load_model
from stepladder.recipe.preference import PreferenceSection
from stepladder.rungs.preference.data import JudgedData, PairData, as_pair, with_reference
from stepladder.rungs.preference.reference_logprobs import ReferenceLog
from stepladder.rungs.preference.update import Answer, Judged, kto_update, pair_loss, preference_update
from stepladder.rungs.reward_model.ranking_update import Ranked, ranking_update
from stepladder.rungs.supervised import sft_update
from stepladder.types import TrainingSample

RATE = 1e-5


def sample(prompt: Sequence[int], answer: Sequence[int], key: str) -> TrainingSample:
    ids = (*prompt, *answer)
    mask = (False,) * len(prompt) + (True,) * len(answer)
    return TrainingSample(ids, mask, (0.0,) * len(ids), key, tuple(int(m) - 1 for m in mask), key)


class Ours:
    """The tasks; each returns the loss of every step."""

    def __init__(self, policy: Policy, rows: Sequence[Row], batch: int, budget: int) -> None:
        self.policy, self.rows, self.batch, self.budget = policy, rows, batch, budget
        self.computed = self.scored = 0.0

    def batches(self, items: Sequence[Any]) -> list[Sequence[Any]]:
        return [items[i : i + self.batch] for i in range(0, len(items), self.batch)]

    def sft(self) -> list[float]:
        optimizer = MasterOptimizer(self.policy.trainable())
        samples = [sample(r["prompt"], r["chosen"], str(i)) for i, r in enumerate(self.rows)]
        losses = []
        for part in self.batches(samples):
            got = sft_update(self.policy, optimizer, part, learning_rate=RATE, token_budget=self.budget)
            losses.append(got["loss"])
            self.computed += got["tokens_computed"]
            self.scored += sum(s.num_trained for s in part)
        return losses

    def dpo(self) -> list[float]:
        pairs = [
            as_pair(sample(r["prompt"], r["chosen"], str(i)), sample(r["prompt"], r["rejected"], str(i)))
            for i, r in enumerate(self.rows)
        ]
        optimizer = MasterOptimizer(self.policy.trainable())
        data = self._with_reference(PairData(pairs, []))
        loss = pair_loss(PreferenceSection(pairs=1, validation=0))
        return [
            preference_update(
                self.policy, optimizer, part, loss, learning_rate=RATE, token_budget=self.budget
            )["loss"]
            for part in self.batches(data.train)
        ]

    def kto(self) -> list[float]:
        judged = []
        for i, row in enumerate(kto_rows(self.rows, self.batch)):
            own = sample(row["prompt"], row["completion"], str(i))
            wrong = sample(row["prompt"], row["mismatched"], str(i))
            judged.append(Judged(Answer(own), Answer(wrong), row["label"]))
        optimizer = MasterOptimizer(self.policy.trainable())
        data = self._with_reference(JudgedData(judged, [], []))
        settings = PreferenceSection(pairs=1, validation=0, loss="kto", batch_size=self.batch)
        return [
            kto_update(self.policy, optimizer, part, settings, learning_rate=RATE, token_budget=self.budget)[
                "loss"
            ]
            for part in self.batches(data.train)
        ]

    def reward(self) -> list[float]:
        self.policy.recompute_layers()  # as trl does: without logits, activations are what memory goes to
        model = ScoredModel(self.policy)
        optimizer = MasterOptimizer(model.trainable())
        rows = []
        for i, r in enumerate(self.rows):
            sides = tuple(sample(r["prompt"], r[side], str(i)) for side in ("chosen", "rejected"))
            rows.append(Ranked(sides, (0,), (1,), (0.0,)))
        return [
            ranking_update(
                model, optimizer, part, centring=0.0, learning_rate=RATE, token_budget=self.budget
            )["loss"]
            for part in self.batches(rows)
        ]

    def _with_reference(self, data: Any) -> Any:
        with tempfile.TemporaryDirectory() as folder:  # nothing is in a cache: the pass is measured
            return with_reference(
                data, ReferenceLog(self.policy, Path(folder), token_budget=self.budget, cache=False)
            )


def main() -> None:
    args = options()
    if args.threads:
        torch.set_num_threads(args.threads)
    rows = read(args.data)
    imports = peak()
    exact = args.mode == "agree"
    dtype = "float32" if exact else "bfloat16"
    policy = Policy(*load_model(args.model, dtype=dtype, device="cpu"))
    run = Ours(policy, rows, args.batch, args.budget)
    began = time.perf_counter()
    losses = getattr(run, args.task)()
    seconds = time.perf_counter() - began
    count = sum(p.numel() for p in policy.trainable().values())
    # masters, two moments and gradients in float32; in bf16 the weights that compute besides
    state = count * (16 if dtype == "float32" else 18) / 1e6
    used = (peak() - imports) / 1e6
    report(args, rows, losses, seconds, used, state, **({} if exact else utilisation(run, seconds)))


def utilisation(run: Ours, seconds: float) -> dict[str, float]:
    """Share of the measured bf16 matrix peak that the model's own arithmetic reached."""
    if not run.computed:
        return {}
    roof = measure_roof("cpu", torch.bfloat16)
    flops = Cost.of(run.policy.lm, torch.bfloat16).train(run.computed, run.scored)
    return {"mfu": flops / seconds / roof.peak, "peak_gflops": roof.peak / 1e9}


if __name__ == "__main__":
    main()
