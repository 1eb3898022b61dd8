"""Golden entries owned by the advantages: inputs as specified, values from the public functions."""

import torch
from maths_helpers import f64, flags, idx, padded, step_loss
from torch import Tensor

from stepladder.objectives import advantages, credit, domains, kl, policy_gradient

SIX = f64(1.0, 0.0, 0.0, 1.0, 0.0, 0.0)
NEAR = f64(0.5, 0.5, 0.5, 0.5001)
FAIL, SOLVED = f64(0.1, 0.1, 0.1, 0.1, 0.0), f64(0.1, 0.1, 0.1, 0.1, 1.0)
OUTCOME = f64(0.0, 0.0, 0.0, 0.0, 1.0)


def group(rewards: Tensor, **options: object) -> list[float]:
    options.setdefault("eps", 0.0)
    return advantages.group_advantages(
        rewards, torch.zeros(len(rewards), dtype=torch.long), **options
    ).tolist()


def table(size: int, *, full: bool) -> dict[str, object]:
    """For k right of `size`: the advantage of a right and of a wrong member under each convention."""
    out: dict[str, object] = {}
    for k in range(size + 1) if full else range(1, size):
        rewards = f64([1.0] * k + [0.0] * (size - k))
        if k in (0, size):
            assert group(rewards) == [0.0] * size
            out[str(k)] = None
            continue
        row: dict[str, object] = {}
        for ddof in (0, 1):
            a = group(rewards, ddof=ddof)
            row[f"ddof{ddof}"] = [a[0], a[-1]]
        if full:
            a = group(rewards, scale="none")
            row["nostd"] = [a[0], a[-1]]
            row["sum_sq_nostd"] = sum(x * x for x in a)
        out[str(k)] = row
    return out


def rfpp_baseline() -> dict[str, list[float]]:
    centred = advantages.group_advantages(f64(1.0, 0.0, 3.0, 1.0), idx(0, 0, 1, 1), scale="none")
    mask = flags(1, 1, 1, 1)
    return {
        "centered": centred.tolist(),
        "whiten_ddof0": advantages.whiten(centred, mask, ddof=0, eps=0.0).tolist(),
        "whiten_ddof1": advantages.whiten(centred, mask, ddof=1, eps=1e-8).tolist(),
    }


def zero_std() -> dict[str, object]:
    """The hazard is float32 arithmetic without the guard; what is required comes from the public function."""
    r = torch.full((12,), 1.15)
    index = torch.zeros(12, dtype=torch.long)
    hazard = {}
    for name, eps, ddof in (
        ("eps1e_8_ddof1", 1e-8, 1),
        ("eps1e_8_ddof0", 1e-8, 0),
        ("eps1e_6_ddof1", 1e-6, 1),
        ("eps1e_4_ddof1", 1e-4, 1),
    ):
        unguarded = ((r - r.mean()) / (r.std(correction=ddof) + eps))[0].item()
        hazard[name] = unguarded
        assert unguarded > 1e-3
        guarded = advantages.group_advantages(r, index, ddof=ddof, eps=eps)
        hazard["required"] = guarded.abs().max().item()
        assert hazard["required"] == 0.0
    return {"fp32_hazard_torch_12x1_15": hazard}


def near_zero() -> dict[str, float]:
    conventions = {
        "trl": (1, 1e-4),
        "verl": (1, 1e-6),
        "openrlhf": (1, 1e-9),
        "drgrpo_repo": (1, 1e-8),
        "open_instruct": (0, 1e-8),
        "areal": (1, 1e-5),
    }
    return {name: group(NEAR, ddof=ddof, eps=eps)[3] for name, (ddof, eps) in conventions.items()}


def gae(gamma: float, lam: float) -> dict[str, list[float]]:
    rewards, values = f64([[0.0, 0.0, 0.0, 1.0]]), f64([[0.5, 0.6, 0.7, 0.8]])
    mask = torch.ones(1, 4, dtype=torch.bool)
    a, r = credit.gae(rewards, values, mask, gamma=gamma, lam=lam)
    return {"adv": a[0].tolist(), "ret": r[0].tolist()}


def masked_gae(observations: str) -> dict[str, list[float]]:
    rewards, values = f64([[0.0, 0.0, 0.0, 1.0]]), f64([[0.5, 0.6, 0.7, 0.8]])
    mask = flags(1, 1, 0, 1).unsqueeze(0)
    a, r = credit.gae(rewards, values, mask, lam=0.95, observations=observations)
    return {"adv": a[0].tolist(), "ret": r[0].tolist()}


def rfpp_returns() -> list[float]:
    rewards = f64([[-0.02, -0.01, 0.97]])
    return credit.token_returns(rewards, torch.ones(1, 3, dtype=torch.bool))[0].tolist()


def kl_reward() -> list[float]:
    mask = torch.ones(1, 3, dtype=torch.bool)
    return credit.kl_penalised_rewards(f64(1.0), f64([[0.1, -0.05, 0.2]]), mask, coefficient=0.1)[0].tolist()


def agentrl() -> dict[str, object]:
    a, counts = f64(1.0, -1.0, 0.5, -0.5), idx(2, 4, 1, 3)
    out = domains.task_normalised_advantages(a, counts, idx(0, 0, 0, 0))
    sigma = (a[0] - a[1]) / (out[0] - out[1])
    return {"mu": (a[0] - sigma * out[0]).item(), "sigma": sigma.item(), "norm": out.tolist()}


def erpo() -> dict[str, object]:
    rewards, group_index = f64(1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0), idx(0, 0, 0, 0, 1, 1, 1, 1)
    one_environment = torch.zeros(8, dtype=torch.long)
    a = domains.environment_scaled_advantages(rewards, group_index, one_environment, eps=0.0)
    centred = advantages.group_advantages(rewards, group_index, scale="none")
    grpo = advantages.group_advantages(rewards, group_index, ddof=0, eps=0.0)
    return {
        "env_std_ddof0": (centred[0] / a[0]).item(),
        "adv": a.view(2, 4).tolist(),
        "grpo": grpo.view(2, 4).tolist(),
    }


def turns(rewards: Tensor, gamma: float = 1.0, baseline: float = 0.0) -> list[float]:
    returns = credit.turn_returns(rewards, torch.zeros(len(rewards), dtype=torch.long), gamma=gamma)
    return (returns - baseline).tolist()


GIGPO = (f64(0.0, 1.0, 0.0, 0.0, 0.0), idx(0, 0, 1, 1, 1), idx(0, 0, 0, 0, 0), idx(0, 1, 0, 2, 1))


def gigpo() -> dict[str, object]:
    def split(x: Tensor) -> list[list[float]]:
        return [x[:2].tolist(), x[2:].tolist()]

    return {
        "returns": split(credit.turn_returns(GIGPO[0], GIGPO[1], gamma=0.95)),
        "mean_norm": split(credit.gigpo_advantages(*GIGPO)),
        "mean_std_norm": split(credit.gigpo_advantages(*GIGPO, scale="group_std")),
    }


def masked_terms() -> dict[str, object]:
    mask = flags(0, 1, 1, 1, 1, 0, 1, 1, 1).unsqueeze(0)
    lp = f64([[-0.1, -0.7, -1.2, -0.3, -0.4, -2.5, -0.6, -0.5, -0.9]])
    losses, metrics = policy_gradient.reinforce(lp, lp, f64(0.8), mask)
    return {
        "n": int(metrics["tokens"]),
        "terms": losses[0].tolist(),
        "sum": step_loss(losses, mask, "sequence_sum").item(),
        "mean": step_loss(losses, mask, "token_mean").item(),
    }


def process(ddof: int) -> list[list[float]]:
    a = credit.process_advantages(
        f64(0.5, 1.0, 0.0, 0.5, 0.5), idx(0, 0, 1, 1, 1), idx(0, 0, 0, 0, 0), ddof=ddof, eps=0.0
    )
    return [a[:2].tolist(), a[2:].tolist()]


def bilevel() -> list[float]:
    rewards, _ = padded([[0, 0, 0, 0, 1.0, 0, 0, 0, 0, 1.0]])
    values = torch.arange(1, 11, dtype=torch.float64).unsqueeze(0) / 10
    return credit.bilevel_gae(rewards, values, idx(*[0] * 5, *[1] * 5).unsqueeze(0))[0][0].tolist()


def signal(p: float) -> dict[str, float]:
    square, informative = advantages.group_signal(p, 8)
    return {"nostd": square, "informative_G8": informative}


DOMAINS = (f64(10.0, 6.0, 8.0, 0.9, 0.1, 0.5), idx(0, 0, 0, 1, 1, 1))
ADAPTIVE = {"target": 6.0, "samples": 256, "horizon": 10000}

CASES = {
    "adv.rloo_k2of6": lambda: group(SIX, baseline="leave_one_out", scale="none"),
    "adv.rloo_rescaled_mean_baseline": lambda: [6 / 5 * a for a in group(SIX, scale="none")],
    "adv.mean": lambda: group(SIX, scale="none"),
    "adv.grpo_ddof0": lambda: group(SIX, ddof=0),
    "adv.grpo_ddof1": lambda: group(SIX, ddof=1),
    "adv.group6_table": lambda: table(6, full=True),
    "adv.group4_17x23": lambda: table(4, full=False),
    "adv.rfpp_baseline": rfpp_baseline,
    "rfpp.returns_kl": rfpp_returns,
    "adv.zero_std": zero_std,
    "adv.near_zero_std": near_zero,
    "gae.g1.0_l0.95": lambda: gae(1.0, 0.95),
    "gae.g0.99_l0.95": lambda: gae(0.99, 0.95),
    "gae.g1.0_l1.0": lambda: gae(1.0, 1.0),
    "gae.g1.0_l0.0": lambda: gae(1.0, 0.0),
    "gae.masked_bridge(verl)": lambda: masked_gae("bridge"),
    "gae.masked_zeroV(openrlhf)": lambda: masked_gae("zero"),
    "klreward.beta0.1_R1": kl_reward,
    "adaptive_kl": lambda: kl.adaptive_kl_coefficient(0.2, kl=9.0, **ADAPTIVE),
    "adaptive_kl_low": lambda: kl.adaptive_kl_coefficient(0.2, kl=1.0, **ADAPTIVE),
    "domain.z_ddof0": lambda: domains.domain_zscores(*DOMAINS).tolist(),
    "domain.z_ddof1": lambda: domains.domain_zscores(*DOMAINS, ddof=1).tolist(),
    "agentrl.token_level": agentrl,
    "erpo": erpo,
    "turn.fail_adv": lambda: turns(FAIL, baseline=0.45),
    "turn.succ_adv": lambda: turns(SOLVED, baseline=0.45),
    "turn.outcome_only_fail": lambda: turns(torch.zeros_like(OUTCOME), baseline=0.45),
    "turn.outcome_only_succ": lambda: turns(OUTCOME, baseline=0.45),
    "turn.rtg_succ_gamma0.8": lambda: turns(SOLVED, gamma=0.8),
    "turn.rtg_fail_gamma0.8": lambda: turns(FAIL, gamma=0.8),
    "gigpo": gigpo,
    "mask": masked_terms,
    "grpo.signal": lambda: {str(p): signal(p) for p in (0.1, 0.25, 0.5, 0.9)},
    "grpo.process": lambda: {f"ddof{ddof}": process(ddof) for ddof in (0, 1)},
    "ragen.bilevel_gae_gamma1_lam1_high0.95(pre-whiten)": bilevel,
}
