"""Estimators over several samples of one problem: pass@k, max@k, best-of-n, votes, the exact optimal
policy."""

import math
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ._checks import require_all_finite, require_positive, require_same_shape, working
from .kl import exact_kl


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """1 − C(n−c, k)/C(n, k), the unbiased chance that k of the n samples drawn hold a right one
    (arXiv:2107.03374).

    Of one problem with c of n right; average it over problems. Exact integers, so n = 200, k = 100 is no
    trouble."""
    _require_counts(samples, correct, k)
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def naive_pass_at_k(samples: int, correct: int, k: int) -> float:
    """1 − (1 − c/n)^k: biased low for k > 1; here to be compared with `pass_at_k`, not to be reported."""
    _require_counts(samples, correct, k)
    return 1.0 - (1.0 - correct / samples) ** k


def pass_at_k_weights(samples: int, correct: int, k: int) -> tuple[float, float]:
    """Gradient weights of right and wrong samples for maximising pass@k (arXiv:2505.15201).

    right: k/n; wrong: (k/n)·pass@(k−1) of the others, (k/n)·(1 − C(n−1−c, k−1)/C(n−1, k−1)).
    """
    _require_counts(samples, correct, k)
    share = k / samples
    others = math.comb(samples - 1, k - 1)
    return share, share * (1.0 - math.comb(max(samples - 1 - correct, 0), k - 1) / others)


def max_at_k(scores: Float[Tensor, "n"], k: int) -> float:
    """E[max of k scores drawn without replacement] = Σ_{i≥k} C(i−1, k−1)·g_(i) / C(n, k), g sorted
    upwards (arXiv:2505.15201)."""
    n = scores.numel()
    _require_counts(n, 0, k)
    if not torch.isfinite(scores).all():
        raise ValueError("scores hold NaN or infinity; leave out what could not be scored and lower n")
    ordered: list[float] = sorted(scores.double().tolist())
    draws = math.comb(n, k)
    # integers are divided first: a binomial of a thousand is no float
    return math.fsum(math.comb(i - 1, k - 1) / draws * ordered[i - 1] for i in range(k, n + 1))


def best_of_n_kl(n: int) -> float:
    """ln n − (n−1)/n in nats: KL(best of n ‖ one sample), exact when scores never tie, else an upper
    bound (arXiv:2401.01879)."""
    _require_n(n)
    return math.log(n) - (n - 1) / n


def best_of_n_distance(n: int) -> float:
    """d = √KL of best-of-n, the axis of over-optimisation curves (arXiv:2210.10760)."""
    return math.sqrt(best_of_n_kl(n))


def best_of_n_win_rate(n: int) -> float:
    """n/(n+1): how often best of n beats one sample by the score it chose by, without ties (with them: at
    most)."""
    _require_n(n)
    return n / (n + 1)


def best_of_n_distribution(
    probabilities: Float[Tensor, "m"], scores: Float[Tensor, "m"], n: int
) -> Float[Tensor, "m"]:
    """The distribution of the best of n draws over m outcomes; outcomes of equal score share by their
    probability.

    P(best has score s) = F(s)^n − F(s−)^n. Its KL to `probabilities` (`exact_kl`) stays below `best_of_n_kl`.
    """
    _require_n(n)
    require_same_shape(probabilities=probabilities, scores=scores)
    p = working(probabilities)
    _require_distribution("probabilities", p)
    if torch.isnan(scores).any():
        raise ValueError("scores hold NaN; leave out the outcomes that could not be scored")
    _, rank = torch.unique(scores, return_inverse=True)
    mass = torch.zeros(int(rank.max()) + 1, dtype=p.dtype, device=p.device).index_add(0, rank, p)
    upto = mass.cumsum(0)
    won = upto**n - (upto - mass).clamp(min=0) ** n
    return torch.where(p > 0, p * (won / torch.where(mass > 0, mass, 1.0))[rank], 0.0)


def majority_vote(answers: Sequence[Hashable]) -> Hashable:
    """The most frequent answer; among equals the one seen first, so that the result does not depend on
    chance."""
    return weighted_vote(answers, [1.0] * len(answers))


def weighted_vote(answers: Sequence[Hashable], scores: Sequence[float]) -> Hashable:
    """The answer with the largest sum of scores (weighted best-of-n); among equals the one seen first."""
    if len(answers) == 0 or len(answers) != len(scores):
        raise ValueError(
            f"need as many scores as answers and at least one, got {len(answers)} and {len(scores)}"
        )
    totals = vote_totals(answers, scores)
    # max keeps the first of equals, and the dictionary keeps the order of first sight.
    return max(totals, key=lambda answer: totals[answer])


def vote_totals(answers: Sequence[Hashable], scores: Sequence[float]) -> dict[Hashable, float]:
    """Sum of scores per distinct answer, in the order of first sight."""
    totals: dict[Hashable, float] = {}
    for answer, score in zip(answers, scores, strict=True):
        if not math.isfinite(score):
            raise ValueError(f"the score of {answer!r} is {score}; leave unscorable answers out")
        totals[answer] = totals.get(answer, 0.0) + score
    return totals


def best_of_n(answers: Sequence[Hashable], scores: Sequence[float]) -> Hashable:
    """The answer with the single highest score; among equals the one seen first."""
    if len(answers) == 0 or len(answers) != len(scores):
        raise ValueError(
            f"need as many scores as answers and at least one, got {len(answers)} and {len(scores)}"
        )
    if not all(math.isfinite(score) for score in scores):
        raise ValueError("scores hold NaN or infinity; leave unscorable answers out")
    return answers[max(range(len(scores)), key=lambda i: scores[i])]


def majority_success(probability: float, voters: int) -> float:
    """P(more than half of n independent voters are right) = Σ_{i>n/2} C(n, i)·p^i·(1−p)^(n−i); n odd."""
    if not 0.0 <= probability <= 1.0 or voters < 1 or voters % 2 == 0:
        raise ValueError(
            f"need a probability in [0, 1] and an odd number of voters, got {probability} and {voters}; "
            "for example 0.6 and 9"
        )
    if probability in (0.0, 1.0):
        return float(probability)
    right, wrong = math.log(probability), math.log1p(-probability)

    def term(i: int) -> float:
        """In logarithms: from a thousand voters on C(n, i) is no float."""
        ways = math.lgamma(voters + 1) - math.lgamma(i + 1) - math.lgamma(voters - i + 1)
        return math.exp(ways + i * right + (voters - i) * wrong)

    return min(1.0, sum(term(i) for i in range(voters // 2 + 1, voters + 1)))


class OptimalPolicy(NamedTuple):
    """The maximiser of E[r] − β·KL(π‖ref) and its numbers: probabilities, Z, KL, E[r], J = E[r] − β·KL =
    β·ln Z."""

    probabilities: Tensor
    partition: Tensor
    kl: Tensor
    expected_reward: Tensor
    objective: Tensor


def optimal_policy(
    reference: Float[Tensor, "m"], rewards: Float[Tensor, "m"], *, beta: float
) -> OptimalPolicy:
    """π* = π_ref·exp(r/β)/Z over a finite set of outcomes (arXiv:2305.18290, eq. 4), computed in log space.

    Its implicit reward β·log(π*/π_ref) differs from r by the constant β·ln Z, so DPO's margins are reward
    differences."""
    require_positive(beta=beta)
    require_same_shape(reference=reference, rewards=rewards)
    ref = working(reference)
    _require_distribution("reference", ref)
    require_all_finite(rewards=rewards)
    tilted = ref.log() + working(rewards) / beta
    log_z = torch.logsumexp(tilted, dim=-1)
    log_pi = tilted - log_z
    pi = log_pi.exp()
    kl = exact_kl(log_pi, ref.log())
    expected = (pi * working(rewards)).sum()
    return OptimalPolicy(pi, log_z.exp(), kl, expected, expected - beta * kl)


def _require_counts(samples: int, correct: int, k: int) -> None:
    if k < 1 or k > samples:
        raise ValueError(
            f"k must lie between 1 and the number of samples {samples}, got {k}; draw more samples"
        )
    if not 0 <= correct <= samples:
        raise ValueError(f"correct must lie between 0 and {samples}, got {correct}")


def _require_n(n: int) -> None:
    if n < 1:
        raise ValueError(f"n must be at least 1, got {n}; for example 16")


def _require_distribution(name: str, p: Tensor) -> None:
    if not (p >= 0).all() or abs(float(p.sum()) - 1.0) > 1e-6:
        raise ValueError(f"{name} must be non-negative and sum to 1, got a sum of {float(p.sum())}")
