"""The objectives beside TRL's own functions, on the same random tensors: losses and gradients.

    bench/parity/setup.sh DIR && PYTHONPATH=. DIR/bin/python bench/parity/compare_trl.py [--out
    bench/results/parity_trl.txt]

TRL's losses are methods of trainers. They are called unbound on a plain namespace that holds the settings
they read, with a stand-in model that returns given log-probabilities; nothing of their arithmetic is
rewritten here. Tensors are float64. A row is equal when loss and gradient agree to 1e-5. Rows marked
"differs" are known differences, explained in docs/decisions.md ("Mathematics"); they must differ, or the
explanation is out of date."""

import argparse
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch
import trl
from torch import Tensor

from stepladder.algorithms import ALGORITHMS
from stepladder.objectives import corrections, distillation, kl, kto, preference, reward_model
from stepladder.objectives.policy_gradient import SURROGATES
from stepladder.objectives.reduce import aggregate, step_denominators, trained_lengths

warnings.filterwarnings("ignore")
TOLERANCE = 1e-5
Solve = Callable[[], tuple[float, Tensor]]


class Random:
    """One draw: 2 groups of 3 trajectories of different length, an observation in the middle of some."""

    def __init__(self, seed: int, drift: float = 0.3, width: int = 9) -> None:
        g = torch.Generator().manual_seed(seed)
        self.lp = -torch.rand(6, width, generator=g, dtype=torch.float64) * 3 - 0.05
        self.old = self.lp + drift * torch.randn(6, width, generator=g, dtype=torch.float64)
        self.ref = self.lp + drift * torch.randn(6, width, generator=g, dtype=torch.float64)
        lengths = torch.randint(2, width + 1, (6, 1), generator=g)
        self.mask = torch.arange(width).unsqueeze(0) < lengths
        self.mask[::2, 1] = False
        self.advantages = torch.randn(6, generator=g, dtype=torch.float64)

    def rows(self, i: int) -> "Random":
        """Row i alone."""
        return self.with_(**{name: value[i : i + 1] for name, value in self.__dict__.items()})

    def with_(self, **columns: Tensor) -> "Random":
        other = Random.__new__(Random)
        other.__dict__ = self.__dict__ | columns
        return other


def identity_accelerator() -> SimpleNamespace:
    return SimpleNamespace(
        gather=lambda x: x,
        gather_for_metrics=lambda x: x,
        reduce=lambda x, reduction="sum": x,
        num_processes=1,
        device=torch.device("cpu"),
        sync_gradients=True,
    )


def grpo_settings(**given: object) -> SimpleNamespace:
    defaults = {
        "aux_loss_enabled": False,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "importance_sampling_level": "token",
        "beta": 0.0,
        "loss_type": "grpo",
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "use_vllm": False,
        "vllm_importance_sampling_correction": False,
        "model": SimpleNamespace(training=True),
        "current_gradient_accumulation_steps": 1,
        "accelerator": identity_accelerator(),
        "max_completion_length": 32,
        "_entropy_bonus_enabled": False,
        "_metrics": {"train": defaultdict(list)},
    }
    arguments = {"delta": None, "use_bias_correction_kl": False, "steps_per_generation": 1}
    arguments |= {name: given.pop(name) for name in list(given) if name in arguments}
    return SimpleNamespace(**(defaults | given), args=SimpleNamespace(**arguments))


def slope(loss: Tensor, *inputs: Tensor) -> tuple[float, Tensor]:
    return loss.item(), torch.cat([g.flatten() for g in torch.autograd.grad(loss, inputs)])


def theirs_grpo(data: Random, trainer: str = "grpo", **given: object) -> tuple[float, Tensor]:
    lp = data.lp.clone().requires_grad_()
    settings = grpo_settings(**given)
    settings._get_per_token_logps_and_entropies = lambda *a, **k: (lp, torch.zeros_like(lp), None)
    ids = torch.zeros(data.mask.shape, dtype=torch.long)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": torch.ones(len(ids), 1),
        "completion_ids": ids,
        "completion_mask": data.mask.double(),
        "advantages": data.advantages,
        "old_per_token_logps": data.old,
        "ref_per_token_logps": data.ref,
        "old_logps": (data.old * data.mask).sum(1),
        "num_items_in_batch": data.mask.sum().double(),
    }
    owner = trl.GRPOTrainer if trainer == "grpo" else trl.RLOOTrainer
    return slope(owner._compute_loss(settings, settings.model, inputs), lp)


def ours_row(
    data: Random, row: str, *, beta: float = 0.0, unbiased: bool = False, **change: object
) -> tuple[float, Tensor]:
    """A row of the table on the same tensors, its clips and aggregation as they stand there unless
    changed."""
    algorithm = ALGORITHMS[row]
    lp = data.lp.clone().requires_grad_()
    options = {
        "clip_low": algorithm.clip_low,
        "clip_high": algorithm.clip_high,
        "ratio_level": algorithm.ratio_level,
        "dual_clip": algorithm.dual_clip,
        "absolute": algorithm.clip_absolute,
    }
    options |= change
    losses, _ = SURROGATES[algorithm.surrogate](lp, data.old, data.advantages, data.mask, **options)
    if beta:
        sampling = data.old if unbiased else None
        losses = losses + beta * kl.kl_estimate(lp, data.ref, data.mask, sampling_logprobs=sampling)
    d = step_denominators(trained_lengths(data.mask), mode=algorithm.aggregation, constant=32)
    return slope(aggregate(losses, data.mask, d), lp)


def model_returning(log_probs: Tensor) -> Callable[..., SimpleNamespace]:
    zeros = torch.zeros_like(log_probs)
    out = SimpleNamespace(
        log_probs=log_probs, entropy=zeros, mean_logits=zeros, is_top1=zeros > 0, log_sum_sq_probs=zeros
    )
    return lambda **_: out


def pair_inputs(data: Random) -> dict[str, Tensor]:
    """TRL's DPO batch: chosen rows, then rejected; position 0 is the prompt, so the shifted mask is ours."""
    mask = torch.cat([torch.zeros(6, 1, dtype=torch.long), data.mask.long()], dim=1)
    ids = torch.ones_like(mask)
    return {"input_ids": ids, "attention_mask": ids, "completion_mask": mask}


def theirs_dpo(
    data: Random, loss_type: str, *, beta: float, label_smoothing: float = 0.0
) -> tuple[float, Tensor]:
    lp = data.lp.clone().requires_grad_()
    ref = (data.ref * data.mask).sum(1)
    settings = SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=identity_accelerator(),
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=[loss_type],
        loss_weights=[1.0],
        beta=beta,
        label_smoothing=label_smoothing,
        use_weighting=False,
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )
    inputs = pair_inputs(data) | {"ref_chosen_logps": ref[:3], "ref_rejected_logps": ref[3:]}
    given = torch.where(data.mask, lp, torch.zeros_like(lp))  # their fused head returns 0 at ignored labels
    model = model_returning(given)
    model.training = True  # type: ignore[attr-defined]
    return slope(trl.DPOTrainer._compute_loss(settings, model, inputs, False), lp)


def ours_pairs(
    data: Random, loss: Callable[..., tuple[Tensor, object]], *, lengths: bool = False, ratios: bool = True
) -> tuple[float, Tensor]:
    lp = data.lp.clone().requires_grad_()
    sums, counts = preference.sequence_sums(lp, data.mask)
    if ratios:
        sums = sums - preference.sequence_sums(data.ref, data.mask)[0]
    tail = (counts[:3], counts[3:]) if lengths else ()
    losses, _ = loss(sums[:3], sums[3:], *tail)
    return slope(preference.mean_over_step(losses, 3), lp)


def theirs_simpo(data: Random, beta: float, gamma: float) -> tuple[float, Tensor]:
    from trl.experimental.cpo import CPOTrainer

    lp = data.lp.clone().requires_grad_()
    average = (lp * data.mask).sum(1) / data.mask.sum(1)
    settings = SimpleNamespace(
        alpha=0.0,
        beta=beta,
        simpo_gamma=gamma,
        loss_type="simpo",
        label_smoothing=0.0,
        accelerator=identity_accelerator(),
    )
    losses, *_ = CPOTrainer.cpo_loss(settings, average[:3], average[3:])
    return slope(losses.mean(), lp)


def theirs_orpo(data: Random, weight: float) -> tuple[float, Tensor]:
    from trl.experimental.orpo import ORPOTrainer

    lp = data.lp.clone().requires_grad_()
    average = (lp * data.mask).sum(1) / data.mask.sum(1)
    settings = SimpleNamespace(beta=weight, accelerator=identity_accelerator())
    losses, *_ = ORPOTrainer.odds_ratio_loss(settings, average[:3], average[3:])
    return slope(-losses.mean(), lp)


def orpo_odds_term(data: Random, weight: float) -> tuple[float, Tensor]:
    """Our loss without its likelihood term, which TRL adds outside this function."""

    def odds(w: Tensor, v: Tensor, w_len: Tensor, v_len: Tensor) -> tuple[Tensor, object]:
        losses, metrics = preference.orpo(w, v, w_len, v_len, weight=weight)
        return losses + w / w_len, metrics

    return ours_pairs(data, odds, lengths=True, ratios=False)


def theirs_kto(data: Random, beta: float, undesirable: float) -> tuple[float, Tensor]:
    lp = data.lp.clone().requires_grad_()
    given = torch.where(data.mask, lp, torch.zeros_like(lp))
    rolled = (data.old * data.mask).sum(1)
    settings = SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=identity_accelerator(),
        aux_loss_enabled=False,
        precompute_ref_logps=True,
        calculate_KL=True,
        loss_type="kto",
        beta=beta,
        desirable_weight=1.0,
        undesirable_weight=undesirable,
        _compute_kl_logps=lambda model, batch: rolled,
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )
    inputs = pair_inputs(data) | {
        "label": torch.tensor([True, True, True, False, False, False]),
        "ref_logps": (data.ref * data.mask).sum(1),
        "ref_KL_logps": (data.ref * data.mask).sum(1) - 1.5,
    }
    return slope(trl.KTOTrainer._compute_loss(settings, model_returning(given), inputs, False), lp)


def ours_kto(data: Random, beta: float, undesirable: float) -> tuple[float, Tensor]:
    lp = data.lp.clone().requires_grad_()
    ref, _ = preference.sequence_sums(data.ref, data.mask)
    rolled, _ = preference.sequence_sums(data.old, data.mask)
    z0 = kto.kto_reference_point(rolled - (ref - 1.5))
    ratio = preference.sequence_sums(lp, data.mask)[0] - ref
    desirable = torch.tensor([True, True, True, False, False, False])
    losses, _ = kto.kto(ratio, desirable, z0, beta=beta, undesirable_weight=undesirable)
    return slope(preference.mean_over_step(losses, 6), lp)


def theirs_reward(data: Random, centring: float) -> tuple[float, Tensor]:
    scores = data.lp[:, :1].clone().requires_grad_()
    settings = SimpleNamespace(
        model=SimpleNamespace(training=True),
        args=SimpleNamespace(center_rewards_coefficient=centring),
        accelerator=identity_accelerator(),
        aux_loss_enabled=False,
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )
    inputs = {"attention_mask": torch.ones(6, 1), "margin": data.old[:3, 0]}
    model = lambda **_: SimpleNamespace(logits=scores)  # noqa: E731
    return slope(trl.RewardTrainer.compute_loss(settings, model, inputs), scores)


def ours_reward(data: Random, centring: float) -> tuple[float, Tensor]:
    scores = data.lp[:, :1].clone().requires_grad_()
    losses, _ = reward_model.bradley_terry(
        scores[:3, 0], scores[3:, 0], margin=data.old[:3, 0], centring=centring
    )
    return slope(preference.mean_over_step(losses, 3), scores)


def distillation_pair(data: Random, beta: float) -> tuple[Solve, Solve]:
    from trl.experimental.gkd import GKDTrainer

    def theirs() -> tuple[float, Tensor]:
        student = data.lp.clone().requires_grad_()
        loss = GKDTrainer.generalized_jsd_loss(
            student.unsqueeze(0), data.ref.unsqueeze(0), beta=beta, reduction="sum"
        )
        return slope(loss, student)

    def ours() -> tuple[float, Tensor]:
        student = data.lp.clone().requires_grad_()
        losses = distillation.generalised_js(
            torch.log_softmax(student, -1), torch.log_softmax(data.ref, -1), beta=beta
        )
        return slope(losses.sum(), student)

    return theirs, ours


def off_policy_pair(data: Random) -> tuple[Solve, Solve]:
    none = torch.zeros(1)

    def theirs() -> tuple[float, Tensor]:
        kept = trl.GRPOTrainer.get_off_policy_mask(
            data.advantages.unsqueeze(1), data.lp, data.old, data.mask.double(), 0.05
        )
        return float(kept.sum()), torch.cat([kept.flatten().double(), none])

    def ours() -> tuple[float, Tensor]:
        kept = corrections.off_policy_sequence_mask(
            data.lp, data.old, data.advantages, data.mask, threshold=0.05
        )
        return float(kept.sum()), torch.cat([kept.double(), none])

    return theirs, ours


def rows(data: Random) -> dict[str, tuple[Solve, Solve]]:
    """name: (theirs, ours), equal up to rounding."""
    gspo = {"importance_sampling_level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4}
    table = {
        "GRPO": (lambda: theirs_grpo(data), lambda: ours_row(data, "grpo")),
        "GRPO, k3 in the loss": (
            lambda: theirs_grpo(data, beta=0.04),
            lambda: ours_row(data, "grpo", beta=0.04),
        ),
        "GRPO, off-policy k3": (
            lambda: theirs_grpo(data, beta=0.04, use_bias_correction_kl=True),
            lambda: ours_row(data, "grpo", beta=0.04, unbiased=True),
        ),
        "GRPO, dual clip 1.5": (
            lambda: theirs_grpo(data, delta=1.5),
            lambda: ours_row(data, "grpo", dual_clip=1.5),
        ),
        "Dr.GRPO": (lambda: theirs_grpo(data, loss_type="dr_grpo"), lambda: ours_row(data, "dr_grpo")),
        "DAPO": (
            lambda: theirs_grpo(data, loss_type="dapo", epsilon_high=0.28),
            lambda: ours_row(data, "dapo"),
        ),
        "GSPO": (lambda: theirs_grpo(data, **gspo), lambda: ours_row(data, "gspo")),
        "GSPO, wide clip": (
            lambda: theirs_grpo(data, **gspo | {"epsilon_low": 0.2, "epsilon_high": 0.27}),
            lambda: ours_row(data, "gspo", clip_low=0.2, clip_high=0.27),
        ),
        "CISPO, absolute cap 1.1": (
            lambda: theirs_grpo(data, loss_type="cispo", epsilon_high=1.1),
            lambda: ours_row(data, "cispo", clip_high=1.1, absolute=True),
        ),
        "RLOO": (lambda: theirs_grpo(data, "rloo"), lambda: ours_row(data, "rloo")),
        "off-policy sequence mask": off_policy_pair(data),
        "DPO": (lambda: theirs_dpo(data, "sigmoid", beta=0.1), lambda: ours_pairs(data, preference.dpo)),
        "DPO, robust": (
            lambda: theirs_dpo(data, "robust", beta=0.1, label_smoothing=0.1),
            lambda: ours_pairs(data, preference.robust_dpo),
        ),
        "DPO, hinge": (
            lambda: theirs_dpo(data, "hinge", beta=0.1),
            lambda: ours_pairs(data, preference.hinge_dpo),
        ),
        "DPO, per token": (
            lambda: theirs_dpo(data, "sigmoid_norm", beta=0.1),
            lambda: ours_pairs(data, preference.length_normalised_dpo, lengths=True),
        ),
        "IPO": (
            lambda: theirs_dpo(data, "ipo", beta=0.1),
            lambda: ours_pairs(data, preference.ipo, lengths=True),
        ),
        "SimPO": (
            lambda: theirs_simpo(data, 2.0, 1.0),
            lambda: ours_pairs(data, lambda *p: preference.simpo(*p, gamma=1.0), lengths=True, ratios=False),
        ),
        "ORPO, odds term": (lambda: theirs_orpo(data, 0.1), lambda: orpo_odds_term(data, 0.1)),
        "KTO": (lambda: theirs_kto(data, 0.1, 1.5), lambda: ours_kto(data, 0.1, 1.5)),
        "reward model, margin, centring": (
            lambda: theirs_reward(data, 0.01),
            lambda: ours_reward(data, 0.01),
        ),
    }
    for beta in (0.0, 0.1, 0.5, 1.0):
        table[f"GKD, beta {beta:g}"] = distillation_pair(data, beta)
    return table


def known_differences(data: Random) -> dict[str, tuple[Solve, Solve]]:
    """name: (theirs, ours), which must differ; the reasons stand in docs/decisions.md."""
    masked = data.with_(mask=data.mask & (torch.arange(6) != 1).unsqueeze(1))

    def one_by_one() -> tuple[float, Tensor]:
        """Their token mean over micro-batches of one row, accumulated: a mean of means."""
        parts = [
            theirs_grpo(data.rows(i), loss_type="bnpo", current_gradient_accumulation_steps=len(data.lp))
            for i in range(len(data.lp))
        ]
        return sum(part[0] for part in parts), torch.cat([part[1] for part in parts])

    return {
        "GRPO with an all-masked row": (lambda: theirs_grpo(masked), lambda: ours_row(masked, "grpo")),
        "Dr.GRPO with an all-masked row": (
            lambda: theirs_grpo(masked, loss_type="dr_grpo"),
            lambda: ours_row(masked, "dr_grpo"),
        ),
        "bnpo in micro-batches": (one_by_one, lambda: ours_row(data, "dapo", clip_high=0.2)),
        "CISPO, cap .28 by name": (
            lambda: theirs_grpo(data, loss_type="cispo", epsilon_high=0.28),
            lambda: ours_row(data, "cispo"),
        ),
        "cDPO by label smoothing": (
            lambda: theirs_dpo(data, "sigmoid", beta=0.1, label_smoothing=0.1),
            lambda: ours_pairs(data, lambda w, v: preference.dpo(w, v, label_smoothing=0.1)),
        ),
    }


def gaps(pairs: list[tuple[Solve, Solve]]) -> tuple[float, float]:
    """Largest difference of loss and of any gradient entry over the draws."""
    loss, gradient = 0.0, 0.0
    for theirs, ours in pairs:
        (a, x), (b, y) = theirs(), ours()
        loss, gradient = max(loss, abs(a - b)), max(gradient, float((x - y).abs().max()))
    return loss, gradient


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    draws = [Random(seed) for seed in range(options.draws)]
    lines = [
        f"stepladder beside TRL {trl.__version__}, torch {torch.__version__}, {len(draws)} draws, float64"
    ]
    lines.append(f"{'objective':34s} {'loss':>10s} {'gradient':>10s}  verdict")
    bad = 0
    for kind, expected in ((rows, True), (known_differences, False)):
        tables = [kind(data) for data in draws]
        for name in tables[0]:
            loss, gradient = gaps([table[name] for table in tables])
            equal = max(loss, gradient) <= TOLERANCE
            bad += equal != expected
            verdict = "equal" if equal else ("DIFFERS" if expected else "differs, see decisions.md")
            lines.append(f"{name:34s} {loss:10.1e} {gradient:10.1e}  {verdict}")
    lines.append(f"{bad} unexpected")
    print("\n".join(lines))
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
