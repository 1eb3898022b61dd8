"""Bad inputs and the words their refusal must hold. Also a script: run without the shape checks of the
tests, it prints every case that is not refused as promised, so that users, who run without them, are known
to get the same answer."""

import re
import sys
from collections.abc import Callable

import torch

from stepladder.objectives import (
    advantages,
    corrections,
    credit,
    critic,
    distillation,
    domains,
    estimators,
    kl,
    kto,
    mirror,
    overoptimisation,
    policy_gradient,
    preference,
    reduce,
    reward_model,
    supervised,
)
from stepladder.objectives.logprobs import chunked_logprobs, full_logprobs, next_token_targets

NAN, INF = float("nan"), float("inf")
LP = torch.full((2, 3), -1.0)
WIDE = torch.full((2, 4), -1.0)
MASK = torch.ones(2, 3, dtype=torch.bool)
HOLE = LP.clone().index_fill(1, torch.tensor([1]), NAN)
A = torch.tensor([1.0, -1.0])
TWO = torch.tensor([0, 0])
S = torch.tensor([0.5, 0.2])
YES = torch.tensor([True, False])
LEN = torch.tensor([2, 3])
P = torch.tensor([0.5, 0.5])
IDS = torch.zeros(2, 3, dtype=torch.long)
WHOLE = torch.tensor([1, 0])
TAIL = torch.tensor([[0.0, 1.0, NAN], [0.0, 1.0, NAN]])
SHORT = torch.tensor([[True, True, False], [True, True, False]])
HIDDEN, HEAD, TARGETS = torch.zeros(4, 5), torch.zeros(7, 5), torch.zeros(4, dtype=torch.long)
ZERO = torch.tensor(0.0)
surrogate = policy_gradient.clipped_surrogate

CASES: dict[str, tuple[Callable[[], object], str]] = {
    # mismatched shapes
    "shape: aggregate": (lambda: reduce.aggregate(LP, MASK[:1], A), "shapes differ"),
    "shape: denominators": (lambda: reduce.aggregate(LP, MASK, torch.ones(3)), "one per row"),
    "shape: step trajectories": (
        lambda: reduce.step_denominators(LEN, mode="token_mean", trajectory_index=torch.zeros(3).long()),
        "shapes differ",
    ),
    "shape: cross entropy": (lambda: supervised.cross_entropy(WIDE, MASK), "shapes differ: logprobs"),
    "shape: surrogate": (lambda: surrogate(LP, WIDE, A, MASK), "shapes differ"),
    "shape: advantages": (lambda: surrogate(LP, LP, torch.ones(3), MASK), r"pass \[B\] = \(2,\)"),
    "shape: corrections": (lambda: corrections.log_weights(LP, WIDE, MASK), "shapes differ"),
    "shape: group index": (lambda: advantages.group_advantages(A, torch.zeros(3).long()), "shapes differ"),
    "shape: whiten": (lambda: advantages.whiten(LP, MASK[:1]), "shapes differ"),
    "shape: kl": (lambda: kl.kl_estimate(LP, WIDE, MASK), "shapes differ"),
    "shape: exact kl": (lambda: kl.exact_kl(LP, WIDE), "shapes differ"),
    "shape: gae": (lambda: credit.gae(LP, WIDE, MASK), "shapes differ"),
    "shape: value": (lambda: critic.value_loss(LP, LP, WIDE, MASK), "shapes differ"),
    "shape: dpo": (lambda: preference.dpo(A, torch.ones(3)), "shapes differ"),
    "shape: kto": (lambda: kto.kto(A, torch.ones(3) > 0, ZERO), "shapes differ"),
    "shape: bradley terry": (lambda: reward_model.bradley_terry(A, torch.ones(3)), "shapes differ"),
    "shape: js": (lambda: distillation.generalised_js(LP, WIDE), "shapes differ"),
    "shape: chunked": (lambda: chunked_logprobs(HIDDEN, HEAD[:, :4], TARGETS), "shapes do not fit"),
    "shape: targets": (lambda: next_token_targets(IDS, MASK[:1]), "shapes differ"),
    "shape: kimi": (lambda: mirror.squared_surrogate(LP, WIDE, A, A, MASK, tau=1.0), "shapes differ"),
    "shape: domains": (lambda: domains.task_normalised_advantages(A, LEN, torch.zeros(3).long()), "shapes"),
    "shape: scores": (
        lambda: credit.kl_penalised_rewards(A[:, None], LP, MASK, coefficient=0.1),
        "scores has shape",
    ),
    "shape: one score": (
        lambda: credit.kl_penalised_rewards(A[:1], LP, MASK, coefficient=0.1),
        "scores has shape",
    ),
    "shape: off-policy mask": (
        lambda: corrections.off_policy_sequence_mask(LP, LP, A[:, None], MASK),
        "advantages has shape",
    ),
    "shape: trajectories of a ratio": (
        lambda: surrogate(LP, LP, A, MASK, ratio_level="sequence", trajectory_index=TWO[:1]),
        "shapes differ",
    ),
    "shape: ratio of a trajectory": (
        lambda: surrogate(
            LP,
            LP,
            A,
            MASK,
            ratio_level="sequence",
            trajectory_log_ratio=A[:, None],
            trajectory_length=A[:, None],
        ),
        "trajectory_log_ratio has shape",
    ),
    "shape: margin": (lambda: reward_model.bradley_terry(A, A, margin=A[:, None]), "shapes differ"),
    "shape: kto reference": (lambda: kto.kto(A, YES, A), "reference_point has shape"),
    "shape: batched hidden states": (
        lambda: chunked_logprobs(HIDDEN[None], HEAD, TARGETS[None]),
        "shapes do not fit",
    ),
    # integers, which would cut every result to an integer
    "integers: rewards": (lambda: advantages.group_advantages(WHOLE, TWO), "rewards.float()"),
    "integers: one baseline": (lambda: advantages.constant_advantages(WHOLE), "rewards.float()"),
    "integers: whiten": (lambda: advantages.whiten(IDS, MASK), "values.float()"),
    "integers: turns": (lambda: credit.turn_returns(WHOLE, TWO, gamma=0.9), "turn_rewards.float()"),
    "integers: token returns": (lambda: credit.token_returns(IDS, MASK, gamma=0.9), "rewards.float()"),
    "integers: kl": (
        lambda: credit.kl_penalised_rewards(A, IDS, MASK, coefficient=0.1),
        "kl.float()",
    ),
    "integers: values": (lambda: credit.gae(LP, IDS, MASK), "values.float()"),
    "integers: gigpo": (lambda: credit.gigpo_advantages(WHOLE, WHOLE, TWO, TWO), "turn_rewards.float()"),
    "integers: tasks": (
        lambda: domains.task_normalised_advantages(WHOLE, LEN, TWO),
        "advantages.float()",
    ),
    "integers: environments": (
        lambda: domains.environment_scaled_advantages(WHOLE, TWO, TWO),
        "rewards.float()",
    ),
    # masks
    "mask: integers": (lambda: surrogate(LP, LP, A, MASK.long()), "pass torch.bool"),
    "mask: floats": (lambda: supervised.cross_entropy(LP, MASK.float()), "pass torch.bool"),
    # missing numbers
    "nan: log-probability": (lambda: surrogate(HOLE, LP, A, MASK), "logprobs has 2 non-finite"),
    "nan: proximal": (lambda: surrogate(LP, HOLE, A, MASK), "proximal_logprobs has 2 non-finite"),
    "nan: advantage": (lambda: surrogate(LP, LP, A * NAN, MASK), "advantages has 6 non-finite"),
    "nan: sft": (lambda: supervised.cross_entropy(HOLE, MASK), "logprobs has 2 non-finite"),
    "nan: reference": (lambda: kl.kl_estimate(LP, HOLE, MASK), "non-finite"),
    "nan: values": (lambda: credit.gae(LP, HOLE, MASK), "values has 2 non-finite"),
    "nan: critic": (lambda: critic.value_loss(LP, LP, HOLE, MASK), "returns has 2 non-finite"),
    "nan: pairs": (lambda: preference.sequence_sums(HOLE, MASK), "non-finite"),
    "nan: scores": (lambda: reward_model.bradley_terry(A * NAN, A), "non-finite"),
    "nan: steps": (lambda: reward_model.step_cross_entropy(HOLE, LP, MASK), "non-finite"),
    "nan: turn rewards": (lambda: credit.turn_returns(A * NAN, TWO), "non-finite"),
    "nan: teacher": (
        lambda: distillation.on_policy_distillation_advantages(LP, HOLE, MASK),
        "teacher_logprobs has 2 non-finite",
    ),
    "nan: whiten": (lambda: advantages.whiten(HOLE, MASK), "NaN or infinity"),
    "nan: max at k": (lambda: estimators.max_at_k(A * NAN, 1), "NaN or infinity"),
    "nan: kimi rewards": (lambda: mirror.squared_surrogate(LP, LP, A * NAN, A, MASK, tau=1.0), "NaN"),
    "nan: vote": (lambda: estimators.weighted_vote(["a"], [NAN]), "unscorable"),
    "nan: reward on padding": (lambda: credit.gae(TAIL, LP, SHORT), "rewards has 2 non-finite"),
    "nan: return on padding": (lambda: credit.token_returns(TAIL, SHORT), "rewards has 2 non-finite"),
    "nan: turn on padding": (
        lambda: credit.bilevel_gae(TAIL, LP, torch.where(SHORT, 0, -1)),
        "rewards has 2 non-finite",
    ),
    "nan: log-ratio, dpo": (lambda: preference.dpo(A * NAN, A), "chosen_log_ratio has 2 non-finite"),
    "nan: log-ratio, ipo": (
        lambda: preference.ipo(A, A * NAN, LEN, LEN, average=False),
        "rejected_log_ratio has 2 non-finite",
    ),
    "nan: simpo": (lambda: preference.simpo(A * NAN, A, LEN, LEN, gamma=1.0), "non-finite"),
    "nan: orpo": (lambda: preference.orpo(-S, S * NAN, LEN, LEN), "non-finite"),
    "nan: gamma": (lambda: preference.simpo(A, A, LEN, LEN, gamma=NAN), "gamma must be finite"),
    "nan: kto": (lambda: kto.kto(A * NAN, YES, ZERO), "log_ratio has 2 non-finite"),
    "nan: kto reference": (lambda: kto.kto_reference_point(A * NAN), "has 2 non-finite"),
    "nan: kto's z0": (lambda: kto.kto(A, YES, ZERO * NAN), "reference_point has 1 non-finite"),
    "nan: margin": (lambda: reward_model.bradley_terry(A, A, margin=NAN), "margin"),
    "nan: centring": (lambda: reward_model.bradley_terry(A, A, centring=NAN), "centring must not"),
    "nan: kl coefficient": (
        lambda: credit.kl_penalised_rewards(A, LP, MASK, coefficient=NAN),
        "must not be negative",
    ),
    "infinite score": (
        lambda: credit.kl_penalised_rewards(A * INF, LP, MASK, coefficient=0.1),
        "infinite",
    ),
    "nan: off-policy advantage": (
        lambda: corrections.off_policy_sequence_mask(LP, LP, A * NAN, MASK),
        "advantages has 2 non-finite",
    ),
    "nan: measured kl": (
        lambda: kl.adaptive_kl_coefficient(0.1, kl=NAN, target=6.0, samples=1, horizon=1),
        "kl must be finite",
    ),
    "nan: measured entropy": (
        lambda: kl.adaptive_entropy_coefficient(0.1, entropy=NAN, target=0.2),
        "entropy must be finite",
    ),
    "nan: baseline": (lambda: advantages.constant_advantages(A, baseline=NAN), "baseline must be finite"),
    "nan: step of a solution": (lambda: reward_model.solution_score(HOLE, MASK), "NaN"),
    "nan: reference distribution": (
        lambda: estimators.optimal_policy(P * NAN, A, beta=1.0),
        "non-negative and sum to 1",
    ),
    "nan: outcome's reward": (lambda: estimators.optimal_policy(P, A * NAN, beta=1.0), "rewards has 2"),
    "nan: best of n": (lambda: estimators.best_of_n_distribution(P, A * NAN, 2), "scores hold NaN"),
    "nan: probabilities": (
        lambda: estimators.best_of_n_distribution(P * NAN, A, 2),
        "non-negative and sum to 1",
    ),
    "infinite bias": (
        lambda: chunked_logprobs(HIDDEN, HEAD, TARGETS, bias=torch.full((7,), -INF)),
        "bias has 7 non-finite",
    ),
    "infinite reward": (lambda: advantages.group_advantages(A * INF, TWO), "infinite"),
    "infinite reward, constant": (lambda: advantages.constant_advantages(A * INF), "infinite"),
    # groups and counts
    "group of one": (lambda: advantages.group_advantages(A, torch.tensor([0, 1])), "group 0 has one member"),
    "kto batch of one": (lambda: kto.mismatched_answers(1), "at least 2"),
    "kto reference of one": (lambda: kto.kto_reference_point(A[:1]), "at least 2"),
    "ranking of one": (lambda: reward_model.bradley_terry_ranked(A[:1]), "at least 2"),
    "group in two environments": (
        lambda: domains.environment_scaled_advantages(A, TWO, torch.tensor([0, 1])),
        "group 0 lies in 2 environments",
    ),
    "no scores": (lambda: reward_model.bradley_terry(A[:0], A[:0]), "no pair"),
    "horizon below a fifth of a batch": (
        lambda: kl.adaptive_kl_coefficient(0.1, kl=0.0, target=6.0, samples=600, horizon=100),
        "below 5 times the horizon",
    ),
    "a step of fewer tokens than its rows": (
        lambda: reduce.step_denominators(LEN, mode="token_mean", tokens=0),
        "tokens is 0",
    ),
    "no pairs": (lambda: preference.dpo(A[:0], A[:0]), "no pair"),
    "k above n": (lambda: estimators.pass_at_k(4, 2, 5), "k must lie between 1 and .* 4, got 5"),
    "k of zero": (lambda: estimators.pass_at_k(4, 2, 0), "k must lie"),
    "more right than drawn": (lambda: estimators.pass_at_k(4, 5, 2), "correct must lie"),
    "max at k above n": (lambda: estimators.max_at_k(A, 3), "k must lie"),
    "best of zero": (lambda: estimators.best_of_n_kl(0), "n must be at least 1"),
    "no answers": (lambda: estimators.majority_vote([]), "at least one"),
    "even voters": (lambda: estimators.majority_success(0.6, 4), "odd number"),
    "empty answer": (lambda: preference.sequence_sums(LP, MASK & False), "no trained token"),
    "solution without steps": (lambda: reward_model.solution_score(LP, MASK & False), "no step"),
    "no completions": (lambda: reward_model.math_shepherd_label([]), "at least one completion"),
    "fit of one point": (lambda: overoptimisation.fit_rl(A[:1], A[:1]), "at least 2"),
    "fit at zero": (lambda: overoptimisation.fit_rl(A * 0, A), "above 0"),
    "one side of kto": (
        lambda: kto.kto_balance(0, 3, desirable_weight=1.0, undesirable_weight=1.0),
        "both kinds",
    ),
    # coefficients
    "beta 0: dpo": (lambda: preference.dpo(A, A, beta=0.0), "beta must be a positive number, got 0.0"),
    "beta < 0: dpo": (lambda: preference.dpo(A, A, beta=-0.1), "beta must be a positive number"),
    "beta nan: dpo": (lambda: preference.dpo(A, A, beta=NAN), "beta must be a positive number"),
    "beta 0: robust": (lambda: preference.robust_dpo(A, A, beta=0.0), "beta must be"),
    "beta 0: hinge": (lambda: preference.hinge_dpo(A, A, beta=0.0), "beta must be"),
    "tau 0: ipo": (lambda: preference.ipo(A, A, LEN, LEN, tau=0.0), "tau must be"),
    "beta 0: simpo": (lambda: preference.simpo(A, A, LEN, LEN, beta=0.0, gamma=1.0), "beta must be"),
    "beta 0: kto": (lambda: kto.kto(A, YES, ZERO, beta=0.0), "beta must be"),
    "beta 0: optimal policy": (lambda: estimators.optimal_policy(P, A, beta=0.0), "beta must be"),
    "weight 0: orpo": (lambda: preference.orpo(-S, -S, LEN, LEN, weight=0.0), "weight must be"),
    "tau 0: kimi": (lambda: mirror.mirror_descent_coefficient(A, A, A, tau=0.0), "tau must be"),
    "target 0: kl": (
        lambda: kl.adaptive_kl_coefficient(0.1, kl=1.0, target=0.0, samples=1, horizon=1),
        "target must be",
    ),
    "temperature 0": (lambda: chunked_logprobs(HIDDEN, HEAD, TARGETS, temperature=0.0), "temperature must"),
    "chunk of half a row": (lambda: chunked_logprobs(HIDDEN, HEAD, TARGETS, chunk=0), "chunk must be"),
    "temperature 0, full": (lambda: full_logprobs(LP, TARGETS[:2], temperature=0.0), "temperature must"),
    "two gammas": (
        lambda: preference.simpo(A, A, LEN, LEN, gamma=1.0, gamma_beta_ratio=0.5),
        "exactly one of gamma",
    ),
    "no gamma": (lambda: preference.simpo(A, A, LEN, LEN), "exactly one of gamma"),
    "smoothing of a half": (lambda: preference.robust_dpo(A, A, label_smoothing=0.5), r"\[0, 0.5\)"),
    "length 0": (lambda: preference.ipo(A, A, LEN * 0, LEN), "below 1"),
    "negative clip": (lambda: surrogate(LP, LP, A, MASK, clip_low=-0.1), "must not be negative"),
    "dual clip below 1": (lambda: surrogate(LP, LP, A, MASK, dual_clip=0.5), "above 1"),
    "clip on reinforce": (lambda: policy_gradient.reinforce(LP, LP, A, MASK, clip_low=0.2), "no ratio"),
    "level on reinforce": (
        lambda: policy_gradient.reinforce(LP, LP, A, MASK, ratio_level="sequence"),
        "no ratio",
    ),
    "level on cispo": (
        lambda: policy_gradient.cispo(LP, LP, A, MASK, ratio_level="sequence"),
        "single tokens",
    ),
    "cap of zero": (lambda: policy_gradient.cispo(LP, LP, A, MASK, clip_high=0.0, absolute=True), "cap"),
    "absolute on ppo": (lambda: surrogate(LP, LP, A, MASK, absolute=True), "belong to cispo"),
    "half of a trajectory": (
        lambda: surrogate(LP, LP, A, MASK, ratio_level="sequence", trajectory_log_ratio=A),
        "trajectory_length",
    ),
    "no constant": (lambda: reduce.step_denominators(LEN, mode="constant"), "positive constant"),
    "no groups": (lambda: reduce.step_denominators(LEN, mode="group_token_mean"), "group_index"),
    "unknown mode": (lambda: reduce.step_denominators(LEN, mode="mean"), "choose one of 'token_mean'"),  # type: ignore[arg-type]
    "unknown estimator": (lambda: kl.kl_estimate(LP, LP, MASK, estimator="k4"), "choose one of 'k1'"),  # type: ignore[arg-type]
    "unknown correction": (
        lambda: corrections.correction_weights(LP, LP, MASK, correction="tis"),  # type: ignore[arg-type]
        "choose one of 'none'",
    ),
    "bounds beside 1": (
        lambda: corrections.correction_weights(LP, LP, MASK, correction="token_mask", low=1.5),
        "must enclose 1",
    ),
    "unknown scale": (lambda: advantages.group_advantages(A, TWO, scale="std"), "choose one of"),  # type: ignore[arg-type]
    "ddof 2": (lambda: advantages.group_advantages(A, TWO, ddof=2), "ddof must be 0"),
    "eps < 0": (lambda: advantages.group_advantages(A, TWO, eps=-1.0), "eps must not be negative"),
    "solve rate above 1": (lambda: advantages.group_signal(1.5, 4), "solve_rate"),
    "gamma above 1": (lambda: credit.gae(LP, LP, MASK, gamma=1.1), r"gamma must lie in \[0, 1\]"),
    "lambda below 0": (lambda: credit.gae(LP, LP, MASK, lam=-0.1), "lam must lie"),
    "truncated without values": (lambda: credit.gae(LP, LP, MASK, truncated=YES), "together"),
    "turn out of range": (lambda: credit.spread_turns(A, IDS + 2), "goes up to 2"),
    "kl coefficient < 0": (
        lambda: credit.kl_penalised_rewards(A, LP, MASK, coefficient=-1.0),
        "must not be negative",
    ),
    "js beta above 1": (lambda: distillation.generalised_js(LP, LP, beta=1.5), r"beta must lie in \[0, 1\]"),
    "target outside the head": (lambda: chunked_logprobs(HIDDEN, HEAD, TARGETS + 7), "head has 7 rows"),
    "ignored target": (lambda: chunked_logprobs(HIDDEN, HEAD, TARGETS - 100), "such as -100"),
    "label outside": (lambda: reward_model.step_cross_entropy(LP, LP, MASK), r"labels must lie in \[0, 1\]"),
    "unknown rating": (lambda: reward_model.prm800k_labels([1, 2]), "got 2"),
    "probability above 1": (lambda: reward_model.solution_score(-LP, MASK), "above 0"),
    "no distribution": (lambda: estimators.optimal_policy(P + 1, A, beta=1.0), "sum to 1"),
    "negative distance": (lambda: overoptimisation.rl_gold_reward(-A, alpha=1.0, beta=1.0), "negative"),
    "value clip 0": (lambda: critic.value_loss(LP, LP, LP, MASK, clip=0.0), "clip must be"),
    "entropy share 0": (lambda: kl.high_entropy_mask(LP, MASK, share=0.0), r"share must lie in \(0, 1\]"),
    "negative tokens": (lambda: domains.task_normalised_advantages(A, -LEN, TWO), "negative count"),
    "centring < 0": (lambda: reward_model.bradley_terry(A, A, centring=-1.0), "centring must not"),
    "ece bins 0": (lambda: reward_model.calibration_error(P, YES, bins=0), "one bin"),
}


def refusal(call: Callable[[], object]) -> str:
    """The message of the ValueError that the call raises, or what happened instead."""
    try:
        result = call()
    except ValueError as error:
        return str(error)
    return f"nothing was raised, the result is {result!r}"


def failures() -> list[str]:
    told = {name: (refusal(call), words) for name, (call, words) in CASES.items()}
    return [f"{name}: {message}" for name, (message, words) in told.items() if not re.search(words, message)]


if __name__ == "__main__":
    print("\n".join(failures()))
    sys.exit(bool(failures()))
