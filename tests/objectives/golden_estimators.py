"""Golden entries owned by the estimators and the diagnostics."""

import json

import torch
from maths_helpers import f64, idx
from torch import Tensor

from stepladder.diagnostics import signals
from stepladder.objectives import estimators, overoptimisation, reward_model
from stepladder.objectives.kl import exact_kl

STEPS = f64([[0.9, 0.8, 0.4]]).log()
COMPLETIONS = [1, 0, 0, 1, 0, 0, 0, 0]


def score(aggregation: str) -> float:
    mask = torch.ones(1, 3, dtype=torch.bool)
    return reward_model.solution_score(STEPS, mask, aggregation=aggregation)[0].item()


def gao(kind: str) -> dict[str, object]:
    rl = kind == "rl"
    alpha, beta = (1.0, 0.25) if rl else (1.0, 0.2)
    curve = overoptimisation.rl_gold_reward if rl else overoptimisation.best_of_n_gold_reward
    peak = (overoptimisation.rl_peak if rl else overoptimisation.best_of_n_peak)(alpha=alpha, beta=beta)
    distances = (1.0, 5.0, 10.0, 20.085537, 40.0, 54.59815) if rl else (1.0, 2.5, 5.0)
    return {
        "alpha": alpha,
        "beta": beta,
        "R_at": {str(d): curve(f64(d), alpha=alpha, beta=beta).item() for d in distances},
        "peak_d": peak.distance,
        "peak_R": peak.reward,
        "zero_d": peak.zero,
    }


def optimum(beta: float) -> dict[str, object]:
    best = estimators.optimal_policy(f64(0.5, 0.3, 0.2), f64(1.0, 0.0, 2.0), beta=beta)
    return {
        "pi": best.probabilities.tolist(),
        "Z": best.partition.item(),
        "KL": best.kl.item(),
        "Er": best.expected_reward.item(),
        "J": best.objective.item(),
        "blogZ": beta * best.partition.log().item(),
    }


def votes() -> dict[str, object]:
    answers = ["12", "12", "7", "7", "12"]
    shown = json.dumps(answers, separators=(",", ":"))
    names, scores = ["A", "A", "B", "B"], [0.9, 0.2, 0.8, 0.7]
    totals = estimators.vote_totals(names, scores)
    picked = estimators.weighted_vote(names, scores)
    single = estimators.best_of_n(names, scores)
    return {
        "maj": f"{shown}->{estimators.majority_vote(answers)}",
        "weighted": list(totals.values()),
        "note": f"answers A:.9,.2 B:.8,.7: sum-weighted picks {picked} 1.5>1.1, max picks {single} .9",
    }


def uniform_best_of_two(outcomes: int) -> float:
    p = torch.full((outcomes,), 1 / outcomes, dtype=torch.float64)
    best = estimators.best_of_n_distribution(p, torch.arange(outcomes, dtype=torch.float64), 2)
    return exact_kl(best.log(), p.log()).item()


def pkpo() -> dict[str, object]:
    right, wrong = estimators.pass_at_k_weights(4, 1, 2)
    return {"n": 4, "c": 1, "k": 2, "correct": right, "incorrect": wrong}


def healthy() -> dict[str, float]:
    cross = f64([[-2.0, -8.0], [-3.0, -9.0], [-7.0, -1.5], [-9.0, -2.5]])
    s = signals.template_collapse(cross, idx(0, 0, 1, 1))
    return {
        "H_cond": s.conditional_entropy.item(),
        "H_marg": s.marginal_entropy.item(),
        "MI": s.mutual_information.item(),
        "bound": s.bound.item(),
        "retr": s.retrieval_accuracy.item(),
    }


def collapsed() -> dict[str, object]:
    cross = f64([[-2.0, -2.0], [-3.0, -3.0], [-2.2, -2.2], [-3.1, -3.1]])
    s = signals.template_collapse(cross, idx(0, 0, 1, 1))
    accuracy = f"{s.retrieval_accuracy.item():.1f} (argmax ties -> col 0)"
    return {
        "H_cond": s.conditional_entropy.item(),
        "MI": s.mutual_information.item(),
        "retr_argmax_ties": accuracy,
    }


def top_p() -> dict[str, float]:
    variances: Tensor = f64(0.25, 0.1875, 0.1875, 0.1, 0.0, 0.0)
    kept = signals.variance_top_p(variances, share=0.9)
    total = variances.sum().item()
    # The threshold is .9·.725 − .01; three groups sum to .625, below it, and four to .725.
    assert variances[:3].sum().item() < 0.9 * total - 0.01 < variances[kept].sum().item()
    return {
        "total": total,
        "thr": 0.9 * total - 0.01,
        "kept": int(kept.sum()),
        "cum": variances[kept].sum().item(),
    }


PASS = [(10, 3, 1), (10, 3, 2), (10, 3, 5), (10, 3, 8), (200, 10, 10), (200, 10, 100), (4, 2, 2), (5, 0, 3)]

CASES = {
    "prm.min": lambda: score("min"),
    "prm.prod": lambda: score("product"),
    "prm.last": lambda: score("last"),
    "prm.mean": lambda: score("mean"),
    "mathshepherd": lambda: {
        "completions": COMPLETIONS,
        "HE": reward_model.math_shepherd_label([bool(c) for c in COMPLETIONS]),
        "SE": reward_model.math_shepherd_label([bool(c) for c in COMPLETIONS], soft=True),
    },
    "passk": lambda: {f"{n},{c},{k}": estimators.pass_at_k(n, c, k) for n, c, k in [*PASS, (5, 5, 3)]},
    "passk_biased_10_3_5": lambda: estimators.naive_pass_at_k(10, 3, 5),
    "maxk": lambda: {str(k): estimators.max_at_k(f64(0.1, 0.4, 0.2, 0.9), k) for k in (1, 2, 3, 4)},
    "pkpo": pkpo,
    "bon.kl": lambda: {str(n): estimators.best_of_n_kl(n) for n in (1, 2, 4, 16, 64, 1000, 60000)},
    "bon.win": lambda: {str(n): estimators.best_of_n_win_rate(n) for n in (1, 4, 16)},
    "bon.d": lambda: {str(n): estimators.best_of_n_distance(n) for n in (4, 16, 64)},
    "bon.exact_uniform_n2": lambda: {
        "exact": {str(m): uniform_best_of_two(m) for m in (2, 4, 100)},
        "formula": estimators.best_of_n_kl(2),
    },
    "gao.rl": lambda: gao("rl"),
    "gao.bon": lambda: gao("bon"),
    "opt.b0.5": lambda: optimum(0.5),
    "opt.b1.0": lambda: optimum(1.0),
    "opt.b2.0": lambda: optimum(2.0),
    "bon_ttc": votes,
    "vote": lambda: {str(n): estimators.majority_success(0.6, n) for n in (1, 3, 5, 9, 33)},
    "mi.healthy": healthy,
    "mi.collapsed": collapsed,
    "ragen2.top_p_linear": top_p,
}
