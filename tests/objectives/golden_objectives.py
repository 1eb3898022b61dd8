"""Golden entries owned by the objectives: inputs as specified, values from the public functions."""

import math

import torch
from maths_helpers import f64, flags, gradient, idx, padded, step_loss
from torch import Tensor

from stepladder.objectives import (
    corrections,
    critic,
    distillation,
    kl,
    kto,
    mirror,
    policy_gradient,
    preference,
    reward_model,
    supervised,
)
from stepladder.objectives.advantages import group_advantages

SFT_LP = f64([[-0.5, -1.0, -1.5, -0.2], [-2.0, -0.1, -0.3, -0.4]])
SFT_MASK = torch.stack([flags(1, 1, 0, 0), flags(0, 1, 1, 1)])
BT = (f64(1.2), f64(0.7))
CHOSEN_SUM, REJECTED_SUM = f64(-0.6), f64(-3.9)
CHOSEN_LEN, REJECTED_LEN = idx(3), idx(6)
PI, REF = f64(0.5, 0.3, 0.2), f64(0.4, 0.4, 0.2)


def one(value: Tensor) -> float:
    return value.squeeze().item()


def sft(mode: str) -> float:
    return one(step_loss(supervised.cross_entropy(SFT_LP, SFT_MASK)[0], SFT_MASK, mode))


def sft_micro() -> dict[str, float]:
    lp, mask = padded([[-0.5, -0.6, -0.7], [-0.75]])
    losses = supervised.cross_entropy(lp, mask)[0]
    alone = [one(step_loss(losses[i : i + 1], mask[i : i + 1], "token_mean")) for i in range(2)]
    return {"mean_of_micro": sum(alone) / 2, "global_token": one(step_loss(losses, mask, "token_mean"))}


def bt_gradient() -> float:
    chosen = BT[0].clone().requires_grad_()
    return one(gradient(reward_model.bradley_terry(chosen, BT[1])[0], chosen))


def prm_bce() -> float:
    logits = torch.logit(f64([[0.9, 0.8, 0.4]]))
    mask = torch.ones(1, 3, dtype=torch.bool)
    losses, _ = reward_model.step_cross_entropy(logits, f64([[1.0, 1.0, 0.0]]), mask)
    return one(step_loss(losses, mask, "token_mean"))


def dpo_case(beta: float) -> dict[str, float]:
    chosen, rejected = f64(-1.4) - f64(-2.2), f64(-2.2) - f64(-1.8)
    margin = preference.dpo_margin(chosen, rejected, beta=beta)
    return {
        "margin": one(margin),
        "loss": one(preference.dpo(chosen, rejected, beta=beta)[0]),
        "weight": one(preference.dpo_gradient_weight(margin, beta=beta)),
        "r_w": one(preference.implicit_reward(chosen, beta=beta)),
        "r_l": one(preference.implicit_reward(rejected, beta=beta)),
    }


def simpo(beta: float, **margin: float) -> float:
    sums = (CHOSEN_SUM, REJECTED_SUM, CHOSEN_LEN, REJECTED_LEN)
    return one(preference.simpo(*sums, beta=beta, **margin)[0])


def kto_value(reward: float, desirable: int) -> float:
    return one(kto.kto_value(f64(reward), flags(desirable), f64([0.0])[0], beta=1.0, undesirable_weight=1.5))


KTO_BATCH = (f64(3.0, -1.0, 2.0, -4.0), flags(1, 1, 0, 0))


def kto_batch() -> dict[str, object]:
    z0 = kto.kto_reference_point(f64(0.6, -0.2, 1.4, 0.2))
    losses, _ = kto.kto(*KTO_BATCH, z0, beta=0.1, undesirable_weight=1.5)
    return {
        "z0": one(z0),
        "losses": losses.tolist(),
        "mean": one(preference.mean_over_step(losses, 4)),
        "kl_neg_clamped": one(kto.kto_reference_point(f64(-1.0, -0.5))),
    }


def kto_unscaled() -> float:
    # The bug: σ(βρ − z0). The same numbers come from a reference point that is already divided by β.
    losses, _ = kto.kto(*KTO_BATCH, f64([0.5 / 0.1])[0], beta=0.1, undesirable_weight=1.5)
    return one(losses.mean())


PPO_CASES = [(1.0, 1), (1.3, 1), (0.7, 1), (1.3, -1), (0.7, -1), (1.25, 1), (1.1, 2), (5.0, -1)]


def surrogate(ratio: float, advantage: float, **clips: object) -> tuple[float, float]:
    """(objective, d objective / d lp) of one token with this ratio."""
    lp = f64([[math.log(ratio)]]).requires_grad_()
    mask = torch.ones(1, 1, dtype=torch.bool)
    losses, _ = policy_gradient.clipped_surrogate(lp, f64([[0.0]]), f64([float(advantage)]), mask, **clips)
    return -one(losses.detach()), -one(gradient(losses, lp))


def ppo_table() -> list[dict[str, float]]:
    return [
        {
            "r": r,
            "A": a,
            "sym": surrogate(r, a)[0],
            "hi28": surrogate(r, a, clip_high=0.28)[0],
            "dual3": surrogate(r, a, dual_clip=3.0)[0],
        }
        for r, a in PPO_CASES
    ]


def value_clip() -> list[dict[str, float]]:
    mask = torch.ones(1, 1, dtype=torch.bool)
    rows = []
    for v, old, ret in ((1.0, 0.5, 1.0), (0.6, 0.5, 1.0), (0.0, 0.5, 1.0)):
        three = (f64([[v]]), f64([[old]]), f64([[ret]]))
        plain, _ = critic.value_loss(*three, mask, clip=None)
        clipped, _ = critic.value_loss(*three, mask, clip=0.2)
        rows.append({"v": v, "old": old, "ret": ret, "unclipped": one(plain), "clipped": one(clipped)})
    return rows


def agg() -> dict[str, float]:
    losses, mask = padded([[1.0, 1.0], [-1.0, -1.0, -1.0, -1.0]])
    return {
        "token_mean": one(step_loss(losses, mask, "token_mean")),
        "seq_mean_token_mean": one(step_loss(losses, mask, "sequence_mean")),
        "seq_mean_token_sum_norm_L8": one(step_loss(losses, mask, "constant", constant=8)),
        "seq_mean_token_sum": one(step_loss(losses, mask, "sequence_sum")),
    }


def token_weights() -> dict[str, list[float]]:
    losses, mask = padded([[1.0, 1.0], [1.0, 1.0, 1.0, 1.0]])
    losses.requires_grad_()

    def weights(mode: str, **given: object) -> list[float]:
        return gradient(step_loss(losses, mask, mode, **given), losses)[:, 0].tolist()

    return {
        "grpo": weights("sequence_mean"),
        "dapo": weights("token_mean"),
        "drgrpo_L8": weights("constant", constant=8),
    }


def dapo_grouping() -> dict[str, object]:
    losses, mask = padded([[1.0] * 2, [1.0] * 2, [-1.0] * 4, [-1.0] * 12])
    grouped = step_loss(losses, mask, "group_token_mean", group_index=idx(0, 0, 1, 1))
    return {
        "per_prompt_group_mean": one(grouped),
        "global_token_mean": one(step_loss(losses, mask, "token_mean")),
        "note": "group1: 2 seqs len 2, loss +1/token; group2: lens 4,12, loss -1/token",
    }


def gspo_parts(log_ratio: list[float]) -> tuple[Tensor, Tensor]:
    return f64([log_ratio]), torch.ones(1, len(log_ratio), dtype=torch.bool)


def gspo_objective(log_ratio: list[float], advantage: float) -> float:
    lp, mask = gspo_parts(log_ratio)
    losses, _ = policy_gradient.clipped_surrogate(
        lp,
        torch.zeros_like(lp),
        f64([advantage]),
        mask,
        ratio_level="sequence",
        clip_low=3e-4,
        clip_high=4e-4,
    )
    return -one(step_loss(losses, mask, "sequence_mean"))


def gspo() -> dict[str, float]:
    log_ratio = [0.1, -0.05, 0.02, -0.03]
    lp, mask = gspo_parts(log_ratio)
    s = policy_gradient.ratios(lp, mask, ratio_level="sequence")[0, 0]
    product = policy_gradient.ratios(lp, mask, ratio_level="product")[0, 0]
    return {
        "mean_log_ratio": one(s.log()),
        "s": one(s),
        "clip_hi": gspo_objective([1.0] * 4, 1.0),
        "obj_A1": gspo_objective(log_ratio, 1.0),
        "obj_Aneg1": gspo_objective(log_ratio, -1.0),
        "unnormalised_seq_ratio": one(product),
    }


def gspo_inside() -> dict[str, float]:
    log_ratio = [0.0004, -0.0002, 0.0003, 0.0001]
    s = policy_gradient.ratios(*gspo_parts(log_ratio), ratio_level="sequence")[0, 0]
    return {"s": one(s), "obj_A1": gspo_objective(log_ratio, 1.0)}


def cispo() -> list[dict[str, float]]:
    rows = []
    for r, a, logp in ((2.0, 1.0, -1.5), (0.5, -1.0, -0.7), (1.1, 0.5, -0.2)):
        lp = f64([[logp]]).requires_grad_()
        old, mask = f64([[logp - math.log(r)]]), torch.ones(1, 1, dtype=torch.bool)
        losses, _ = policy_gradient.cispo(lp, old, f64([a]), mask)
        ppo, _ = policy_gradient.clipped_surrogate(lp, old, f64([a]), mask, clip_high=0.28)
        rows.append(
            {
                "r": r,
                "A": a,
                "logp": logp,
                "loss": one(losses.detach()),
                "dloss_dlogp": one(gradient(losses, lp)),
                "ppo_grad": one(gradient(ppo, lp)),
            }
        )
    return rows


def k_each(estimator: str) -> Tensor:
    mask = torch.ones(1, 3, dtype=torch.bool)
    return kl.kl_estimate(PI.log().unsqueeze(0), REF.log().unsqueeze(0), mask, estimator=estimator)[0]


def k_single(d: float) -> dict[str, float]:
    mask = torch.ones(1, 1, dtype=torch.bool)
    return {
        name: one(kl.kl_estimate(f64([[d]]), f64([[0.0]]), mask, estimator=name))
        for name in ("k1", "k2", "k3")
    }


def expected_gradients() -> dict[str, list[float]]:
    logits = PI.log().clone().requires_grad_()
    logp = torch.log_softmax(logits, -1)
    mask = torch.ones(1, 3, dtype=torch.bool)

    def of_estimate(name: str) -> list[float]:
        # samples come from π, whose own dependence on the logits a loss does not differentiate
        values = kl.kl_estimate(logp.unsqueeze(0), REF.log().unsqueeze(0), mask, estimator=name)
        return gradient((PI * values[0]).sum(), logits).tolist()

    return {
        "k1": of_estimate("k1"),
        "k2": of_estimate("k2"),
        "k3": of_estimate("k3"),
        "true_grad_KL_pi_ref": gradient(kl.exact_kl(logp, REF.log()), logits).tolist(),
        "true_grad_KL_ref_pi": gradient(kl.exact_kl(REF.log(), logp), logits).tolist(),
    }


TRAIN, ENGINE = f64([[-1.0, -2.0, -0.5]]), f64([[-1.2, -3.0, -0.4]])
THREE = torch.ones(1, 3, dtype=torch.bool)


def weights(correction: str, **bounds: float) -> Tensor:
    return corrections.correction_weights(TRAIN, ENGINE, THREE, correction=correction, **bounds)[0][0]


def tis_sequence() -> dict[str, float]:
    log_w = corrections.log_weights(TRAIN, ENGINE, THREE)
    geometric = policy_gradient.ratios(log_w, THREE, ratio_level="sequence")
    # The kept weights of the geometric mask are those of the tokens; its criterion is this mean.
    assert weights("geometric_mask", high=1.44292).tolist() == weights("token_cap", high=1e9).tolist()
    assert weights("geometric_mask", high=1.44291).tolist() == [0.0, 0.0, 0.0]
    return {
        "prod": weights("sequence_cap", high=1e9)[0].item(),
        "cap2": weights("sequence_cap", high=2.0)[0].item(),
        "geo": geometric[0, 0].item(),
        "seq_mask_cap3": weights("sequence_mask", high=3.0)[0].item(),
    }


def mismatch() -> dict[str, float]:
    metrics = corrections.mismatch_metrics(TRAIN, ENGINE, THREE)
    names = {
        "kl_k1": "mismatch_k1",
        "kl_k3": "mismatch_k3",
        "ppl_ratio": "ppl_ratio",
        "chi2_token": "chi2",
        "ess": "ess",
    }
    return {golden: one(metrics[ours]) for golden, ours in names.items()}


def decoupled() -> list[dict[str, float]]:
    mask = torch.ones(1, 1, dtype=torch.bool)
    rows = []
    for theta, prox, behav, a in (
        (-1.0, -1.1, -1.5, 1.0),
        (-1.0, -1.1, -1.5, -1.0),
        (-2.0, -1.1, -1.5, -1.0),
        (-0.7, -1.1, -1.5, 1.0),
    ):
        lp, p, b = f64([[theta]]), f64([[prox]]), f64([[behav]])
        losses, _ = policy_gradient.clipped_surrogate(lp, p, f64([a]), mask)
        w, _ = corrections.correction_weights(p, b, mask, correction="token_cap", high=1e9)
        naive, _ = policy_gradient.clipped_surrogate(lp, b, f64([a]), mask)
        rows.append(
            {
                "theta": theta,
                "prox": prox,
                "behav": behav,
                "A": a,
                "obj": -one(w * losses),
                "naive_ppo": -one(naive),
            }
        )
    return rows


def off_policy_rule() -> dict[str, str]:
    def kept(advantage: float, drift: float) -> bool:
        lp, old = f64([[-1.0, -1.0]]), f64([[-1.0 + drift, -1.0 + drift]])
        mask = torch.ones(1, 2, dtype=torch.bool)
        return bool(corrections.off_policy_sequence_mask(lp, old, f64([advantage]), mask, threshold=0.5)[0])

    assert not kept(-1.0, 0.6)
    assert kept(-1.0, 0.4)
    assert kept(0.0, 0.6)
    assert kept(1.0, 0.6)
    return {"ex": "A<0 and mean(log old - log new)=0.6 > delta 0.5 -> dropped; same with A>=0 -> kept"}


def full_objective() -> dict[str, object]:
    lp, mask = padded([[-1.0, -0.5], [-0.8, -1.2, -0.3]])
    old, _ = padded([[-1.1, -0.5], [-0.8, -1.0, -0.6]])
    ref, _ = padded([[-1.05, -0.6], [-0.9, -1.1, -0.5]])
    k3 = kl.kl_estimate(lp, ref, mask, estimator="k3")
    rewards, group = f64(1.0, 0.0), idx(0, 0)
    advantages = {
        "ddof0": group_advantages(rewards, group, ddof=0, eps=0.0),
        "ddof1": group_advantages(rewards, group, ddof=1, eps=0.0),
        "nostd": group_advantages(rewards, group, scale="none"),
    }
    out: dict[str, object] = {}
    for name, a in advantages.items():
        policy, _ = policy_gradient.clipped_surrogate(lp, old, a, mask)
        for beta in (0.0, 0.04):
            losses = policy + beta * k3
            out[f"{name}_beta{beta}"] = {
                "grpo": one(step_loss(losses, mask, "sequence_mean")),
                "token_mean": one(step_loss(losses, mask, "token_mean")),
                "drgrpo_L4": one(step_loss(losses, mask, "constant", constant=4)),
            }
    log_ratio = policy_gradient.log_ratios(lp, old, mask)
    out["gspo_ratios"] = policy_gradient.ratios(log_ratio, mask, ratio_level="sequence")[:, 0].tolist()
    clips = {"clip_low": 3e-4, "clip_high": 4e-4}
    sequence, _ = policy_gradient.clipped_surrogate(
        lp, old, f64(1.0, -1.0), mask, ratio_level="sequence", **clips
    )
    out["gspo_loss_A+-1_eps3e-4_4e-4"] = one(step_loss(sequence, mask, "sequence_mean"))
    capped, _ = policy_gradient.cispo(lp, old, f64(1.0, -1.0), mask)
    out["cispo_loss_A+-1_cap1.28_tokenmean"] = one(step_loss(capped, mask, "token_mean"))
    out["kl3_tokens"] = [k3[i][mask[i]].tolist() for i in range(2)]
    return out


def gkd() -> dict[str, float]:
    teacher, student = f64(0.6, 0.3, 0.1).log(), f64(0.3, 0.4, 0.3).log()
    return {
        f"{beta:g}": one(distillation.generalised_js(student, teacher, beta=beta))
        for beta in (0.0, 0.1, 0.5, 0.9, 1.0)
    }


def kimi() -> list[float]:
    half = f64(0.5, 0.5)
    return mirror.mirror_descent_coefficient(f64(1.0, 0.0), half, f64(0.2, -0.1), tau=0.5).tolist()


def opd() -> list[float]:
    student, teacher = f64([[-1.0, -0.2, -0.7]]), f64([[-0.4, -2.0, -0.7]])
    return distillation.on_policy_distillation_advantages(student, teacher, THREE)[0].tolist()


DPO_PAIR = (f64(0.8), f64(-0.4))
IPO_LENGTHS = (idx(8), idx(4))

CASES = {
    "sft.token_mean": lambda: sft("token_mean"),
    "sft.seq_mean": lambda: sft("sequence_mean"),
    "sft.micro_vs_global": sft_micro,
    "bt.loss": lambda: one(reward_model.bradley_terry(*BT)[0]),
    "bt.loss_margin1": lambda: one(reward_model.bradley_terry(*BT, margin=1.0)[0]),
    "bt.loss_margin_1_3": lambda: one(reward_model.bradley_terry(*BT, margin=1 / 3)[0]),
    "bt.center_0.01": lambda: one(reward_model.bradley_terry(*BT, centring=0.01)[0]),
    "bt.grad_rw": bt_gradient,
    "bt.p": lambda: one(reward_model.preference_probability(*BT)),
    "bt.K4_listwise_mean": lambda: one(reward_model.bradley_terry_ranked(f64(2.0, 1.0, 0.5, 0.0))),
    "prm.bce_mean": prm_bce,
    "dpo.b0.1": lambda: dpo_case(0.1),
    "dpo.b0.5": lambda: dpo_case(0.5),
    "dpo.weights_b0.1": lambda: {
        str(m): one(preference.dpo_gradient_weight(f64(m), beta=0.1)) for m in (-0.5, 0.0, 0.12, 1.0)
    },
    "cdpo.eps0.1": lambda: one(preference.dpo(*DPO_PAIR, label_smoothing=0.1)[0]),
    "robust.eps0.1": lambda: one(preference.robust_dpo(*DPO_PAIR, label_smoothing=0.1)[0]),
    "dpo.hinge_b0.1": lambda: one(preference.hinge_dpo(*DPO_PAIR)[0]),
    "ipo.sum_tau0.1": lambda: one(preference.ipo(*DPO_PAIR, *IPO_LENGTHS, tau=0.1, average=False)[0]),
    "ipo.avg_tau0.1_len8_4": lambda: one(preference.ipo(*DPO_PAIR, *IPO_LENGTHS, tau=0.1)[0]),
    "dpo.conservative_grad_eps0.1": lambda: one(
        preference.dpo_gradient_weight(f64(0.12), beta=0.1, label_smoothing=0.1)
    ),
    "simpo.b2.0_g1.0": lambda: simpo(2.0, gamma=1.0),
    "simpo.b2.5_g1.375": lambda: simpo(2.5, gamma_beta_ratio=0.55),
    "simpo.b10.0_g3.0": lambda: simpo(10.0, gamma_beta_ratio=0.3),
    "simpo.weight_b2_g1": lambda: one(
        preference.simpo_gradient_weight(CHOSEN_SUM, REJECTED_SUM, CHOSEN_LEN, REJECTED_LEN)
    ),
    "kto.up_above": lambda: kto_value(0.5, 1),
    "kto.up_below": lambda: kto_value(-0.5, 1),
    "kto.dn_below": lambda: kto_value(-0.5, 0),
    "kto.dn_above": lambda: kto_value(0.5, 0),
    "kto.batch": kto_batch,
    "kto.batch_WRONG_unscaled_z0": kto_unscaled,
    "ppo.table": ppo_table,
    "ppo.grad_flags": lambda: [{"r": r, "A": a, "grad": surrogate(r, a)[1]} for r, a in PPO_CASES],
    "ppo.value_clip": value_clip,
    "agg": agg,
    "agg.per_token_weight": token_weights,
    "dapo.grouping": dapo_grouping,
    "gspo": gspo,
    "gspo_inside": gspo_inside,
    "cispo": cispo,
    "kl.exact": lambda: one(kl.exact_kl(PI.log(), REF.log())),
    "kl.k1_each": lambda: k_each("k1").tolist(),
    "kl.k2_each": lambda: k_each("k2").tolist(),
    "kl.k3_each": lambda: k_each("k3").tolist(),
    "kl.E": lambda: {name: (PI * k_each(name)).sum().item() for name in ("k1", "k2", "k3")},
    "kl.reverse_exact_KL(ref||pi)": lambda: one(kl.exact_kl(REF.log(), PI.log())),
    "kl.single": lambda: {str(d): k_single(d) for d in (0.1, -0.1, 0.5, -0.5, 1.0, -1.0)},
    "kl.expected_grad": expected_gradients,
    "entropy.p532": lambda: one(kl.exact_entropy(PI.log())),
    "entropy.uniform5": lambda: one(kl.exact_entropy(torch.full((5,), 0.2, dtype=torch.float64).log())),
    "tis.rho": lambda: weights("token_cap", high=1e9).tolist(),
    "tis.cap2": lambda: weights("token_cap", high=2.0).tolist(),
    "icepop.0.5_2": lambda: weights("token_mask", low=0.5, high=2.0).tolist(),
    "tis.seq": tis_sequence,
    "mismatch": mismatch,
    "areal.decoupled": decoupled,
    "off_policy_seq_mask": off_policy_rule,
    "full_objective": full_objective,
    "gkd(P=teacher,Q=student)": gkd,
    "opd.per_token_adv": opd,
    "kimi.grad_coef_tau0.5": kimi,
}
