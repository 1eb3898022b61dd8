"""Small errors of the kind that trainers have shipped, each as (file, what stands there, what the error
writes)."""

from typing import NamedTuple


class Mutant(NamedTuple):
    file: str
    right: str
    wrong: str
    what: str


REDUCE, PG, ADV, CREDIT = "reduce.py", "policy_gradient.py", "advantages.py", "credit.py"
KL, PREF, KTO, CORR = "kl.py", "preference.py", "kto.py", "corrections.py"
LOGP, EST, OVER, RM = "logprobs.py", "estimators.py", "overoptimisation.py", "reward_model.py"

MUTANTS = [
    # reductions
    Mutant(
        REDUCE,
        "rows = working(zero_where_masked(mask, token_losses))",
        "rows = working(token_losses)",
        "mask dropped in the sum",
    ),
    Mutant(
        REDUCE,
        "return mask.sum(dim=-1)",
        "return torch.full_like(mask.sum(dim=-1), mask.shape[-1])",
        "padded width for length",
    ),
    Mutant(
        REDUCE,
        'counts["sequences"] * row_trajectory_tokens',
        'counts["sequences"] * trained',
        "row length for trajectory length",
    ),
    Mutant(
        REDUCE, "float((trajectory_tokens > 0).sum())", "float(len(lengths))", "rows counted for trajectories"
    ),
    Mutant(
        REDUCE,
        '"constant": counts["sequences"] *',
        '"constant": counts["tokens"] *',
        "wrong denominator: tokens × constant",
    ),
    Mutant(
        REDUCE,
        "return per_row, float((per_group > 0).sum())",
        "return per_row, 1.0",
        "sum over groups for mean",
    ),
    Mutant(
        REDUCE,
        "merged[name] = (values * weights).sum() / weights.sum().clamp(min=1)",
        "merged[name] = values.sum()",
        "metrics summed over micro-batches",
    ),
    Mutant(
        "_checks.py",
        "return tensor.to(torch.promote_types(tensor.dtype, torch.float32))",
        "return tensor",
        "sums in half precision",
    ),
    # surrogates
    Mutant(
        PG,
        "objective = torch.minimum(ratio * advantage",
        "objective = torch.maximum(ratio * advantage",
        "max for min",
    ),
    Mutant(PG, "    losses = -objective\n", "    losses = objective\n", "sign of the surrogate"),
    Mutant(
        PG,
        'high = float("inf") if clip_high is None else 1 + clip_high',
        'high = float("inf") if clip_high is None else 1 + (clip_low or 0.0)',
        "clip-higher ignored",
    ),
    Mutant(
        PG,
        'summed / lengths.clamp(min=1) if ratio_level == "sequence"',
        'summed / mask.shape[-1] if ratio_level == "sequence"',
        "GSPO mean over padded width",
    ),
    Mutant(
        PG,
        "return value * (log_ratio - log_ratio.detach()).exp()",
        "return value.expand_as(log_ratio)",
        "sequence ratio without gradient",
    ),
    Mutant(
        PG,
        "torch.maximum(objective, dual_clip * advantage)",
        "torch.minimum(objective, dual_clip * advantage)",
        "dual clip on the wrong side",
    ),
    Mutant(
        PG,
        "objective = torch.where(advantage < 0, torch.maximum",
        "objective = torch.where(advantage > 0, torch.maximum",
        "dual clip for the wrong sign",
    ),
    Mutant(
        PG,
        "weight = ratio.detach().clamp(floor, cap)",
        "weight = ratio.clamp(floor, cap)",
        "CISPO weight differentiated",
    ),
    Mutant(
        PG,
        "low, high = (clip_low, clip_high) if absolute else",
        "low, high = (clip_low, clip_high) if True else",
        "relative cap read as absolute",
    ),
    Mutant(
        PG,
        "    losses = -advantage * zero_where_masked(mask, working(logprobs))",
        "    losses = -zero_where_masked(mask, working(logprobs))",
        "REINFORCE without advantage",
    ),
    Mutant(
        PG,
        "losses = losses - losses.detach() * (1 - share)",
        "losses = losses * share",
        "RLOO gradient divided by length",
    ),
    Mutant(
        PG,
        "working(proximal_logprobs.detach())",
        "working(logprobs.detach())",
        "ratio against itself, always 1",
    ),
    Mutant(
        PG,
        "current = zero_where_masked(mask, working(logprobs))",
        "current = working(logprobs)",
        "padding reaches the ratio",
    ),
    Mutant(
        PG,
        "too_low = (advantage < 0) & (ratio < low) & mask",
        "too_low = (ratio < low) & mask",
        "clip share counts harmless tokens",
    ),
    # advantages
    Mutant(ADV, "/ (count - ddof).clamp(min=1)", "/ count.clamp(min=1)", "ddof ignored"),
    Mutant(
        ADV,
        "equal = (count == 0) | equal_within_float_noise(low, high, mean)",
        "equal = count == 0",
        "zero guard removed",
    ),
    Mutant(
        ADV,
        "centred = centred * count / (count - 1).clamp(min=1)",
        "centred = centred * (count - 1) / count",
        "leave-one-out factor inverted",
    ),
    Mutant(
        ADV,
        "class_statistics(rewards, group_index, valid, ddof=ddof)",
        "class_statistics(rewards, group_index * 0, valid, ddof=ddof)",
        "batch for group",
    ),
    Mutant(
        ADV,
        "valid = ~torch.isnan(rewards)",
        "valid = torch.ones_like(rewards, dtype=torch.bool)",
        "NaN rewards not excluded",
    ),
    Mutant(
        ADV,
        "centred / (std + eps), torch.zeros_like(centred)",
        "centred / (std**2 + eps).sqrt(), torch.zeros_like(centred)",
        "eps inside the root",
    ),
    Mutant(
        ADV,
        "max(x.numel() - ddof, 1) + eps).sqrt()",
        "max(x.numel(), 1) + eps).sqrt()",
        "whitening ignores ddof",
    ),
    Mutant(
        ADV,
        "1.0 - solve_rate**group_size - failure**group_size",
        "1.0 - failure**group_size",
        "all-right groups counted as signal",
    ),
    Mutant(ADV, "mean.abs().clamp(min=1.0)", "mean.abs()", "guard without its absolute part"),
    # credit
    Mutant(
        CREDIT,
        "delta = r[:, t] + gamma * next_value - v[:, t]",
        "delta = r[:, t] + gamma * next_value + v[:, t]",
        "sign of the value",
    ),
    Mutant(
        CREDIT,
        "advantage = delta + gamma * lam * next_advantage",
        "advantage = delta + lam * next_advantage",
        "γ missing in GAE",
    ),
    Mutant(
        CREDIT,
        'moves = mask[:, t] if observations == "bridge" else torch.ones_like(mask[:, t])',
        "moves = torch.ones_like(mask[:, t])",
        "observations bootstrapped",
    ),
    Mutant(
        CREDIT,
        "return torch.where(truncated, final_values.detach().double(), zero)",
        "return final_values.detach().double()",
        "termination bootstraps",
    ),
    Mutant(
        CREDIT,
        "owner = torch.where(mask, position, -1).cummax(dim=-1).values",
        "owner = torch.where(mask, position, -1)",
        "rewards on observations lost",
    ),
    Mutant(
        CREDIT,
        "rewards = -coefficient * zero_where_masked",
        "rewards = coefficient * zero_where_masked",
        "KL rewarded",
    ),
    Mutant(
        CREDIT,
        "return mask & (trained_from_here == 1)",
        "return mask & (torch.arange(mask.shape[-1], device=mask.device) == mask.shape[-1] - 1)",
        "score at the last column",
    ),
    Mutant(
        CREDIT,
        "reward + gamma * following.get(trajectory, 0.0)",
        "reward + gamma * sum(following.values())",
        "turns of other trajectories mixed",
    ),
    Mutant(
        CREDIT,
        "next_value = torch.where(ends[:, t], zero, next_value)",
        "next_value = next_value",
        "token credit crosses turns",
    ),
    Mutant(
        CREDIT,
        "torch.unique(torch.stack([group_index, anchor_index])",
        "torch.unique(torch.stack([anchor_index, anchor_index])",
        "anchors of other prompts mixed",
    ),
    Mutant(
        CREDIT,
        "equal | (members < 2), torch.zeros_like(returns), returns - mean",
        "equal, torch.zeros_like(returns), returns",
        "anchor baseline missing",
    ),
    Mutant(
        CREDIT,
        "(next_value + turn_lam * next_advantage)",
        "(next_value + next_advantage)",
        "trace between turns not decayed",
    ),
    # KL
    Mutant(
        KL,
        "estimate = (-held).exp() - 1 + held",
        "estimate = held.exp() - 1 - held",
        "k3 the other way round",
    ),
    Mutant(KL, "held = d.clamp(min=-LOG_RATIO_LIMIT)", "held = d", "KL not clamped"),
    Mutant(
        KL,
        "estimate = (-held).exp() - 1 + held",
        "estimate = (-held).exp() - 1 + d",
        "k3 pushes away beyond its clamp",
    ),
    Mutant(KL, "estimate = 0.5 * d**2", "estimate = d**2", "k2 doubled"),
    Mutant(
        KL,
        "estimate = estimate * drift.clamp",
        "estimate = estimate * drift.detach().clamp",
        "off-policy KL weight detached",
    ),
    Mutant(
        KL,
        "error = max(-0.2, min(0.2, kl / target - 1.0))",
        "error = min(0.2, kl / target - 1.0)",
        "adaptive KL clipped on one side",
    ),
    Mutant(
        KL,
        "return -(p.exp() * finite).sum(dim=-1)",
        "return -(p.exp() * finite).mean(dim=-1)",
        "entropy as a mean over the vocabulary",
    ),
    # preference
    Mutant(
        PREF,
        "losses = (1 - label_smoothing) * softplus(-m) + label_smoothing * softplus(m)",
        "losses = (1 - label_smoothing) * softplus(m) + label_smoothing * softplus(-m)",
        "DPO sides swapped",
    ),
    Mutant(
        PREF,
        "implicit_reward(chosen_log_ratio, beta=beta) - implicit_reward(rejected_log_ratio, beta=beta)",
        "chosen_log_ratio - rejected_log_ratio",
        "β missing in the margin",
    ),
    Mutant(
        PREF,
        "return losses / (1 - 2 * label_smoothing), metrics",
        "return losses, metrics",
        "robust DPO not rescaled",
    ),
    Mutant(PREF, "- 1 / (2 * tau)) ** 2", "- 1 / tau) ** 2", "IPO target doubled"),
    Mutant(
        PREF,
        "return total / lengths.to(total.dtype)",
        "return total / lengths.to(total.dtype).mean()",
        "one length for all answers",
    ),
    Mutant(PREF, "else beta * (ratio or 0.0)", "else (ratio or 0.0)", "γ/β used as γ"),
    Mutant(
        PREF,
        "m = dpo_margin(chosen, rejected, beta=beta) - gamma",
        "m = dpo_margin(chosen, rejected, beta=beta) + gamma",
        "sign of γ",
    ),
    Mutant(PREF, "return bounded - torch.log(-torch.expm1(bounded))", "return bounded", "ORPO without odds"),
    Mutant(
        PREF,
        "(chosen > rejected).to(chosen.dtype)",
        "(chosen >= rejected).to(chosen.dtype)",
        "ties counted as wins",
    ),
    Mutant(
        KTO,
        "above = beta * (working(log_ratio) - reference_point.detach())",
        "above = beta * working(log_ratio) - reference_point.detach()",
        "unscaled z0",
    ),
    Mutant(KTO, ".mean().clamp(min=0.0)", ".mean()", "z0 not clamped"),
    Mutant(
        KTO,
        "working(mismatched_log_ratio.detach()).mean().clamp(min=0.0)",
        "working(mismatched_log_ratio.detach()).clamp(min=0.0).mean()",
        "z0 clamped before the mean",
    ),
    Mutant(
        KTO,
        "torch.where(desirable, gain, undesirable_weight * torch.sigmoid(-above))",
        "torch.where(desirable, gain, undesirable_weight * torch.sigmoid(above))",
        "undesirable answers pushed up",
    ),
    Mutant(
        KTO,
        "return torch.arange(count).roll(1)",
        "return torch.arange(count)",
        "matched pairs for mismatched",
    ),
    # reward models
    Mutant(RM, "softplus(-(w - v - margin))", "softplus(-(w - v + margin))", "sign of the margin"),
    Mutant(RM, "centring * (w + v) ** 2", "centring * (w - v) ** 2", "centring the difference"),
    Mutant(RM, "step <= first_wrong", "step < first_wrong", "first wrong step not supervised"),
    Mutant(
        RM,
        "last = torch.where(mask, position, -1).amax(dim=-1)",
        "last = torch.full_like(position[:1], mask.shape[-1] - 1).expand(len(mask))",
        "last column for last step",
    ),
    # corrections
    Mutant(
        CORR,
        '"token_cap": ("token", "token", "cap")',
        '"token_cap": ("token", "token", "mask")',
        "truncation drops instead",
    ),
    Mutant(
        CORR,
        '"geometric_mask": ("token", "mean", "mask")',
        '"geometric_mask": ("token", "product", "mask")',
        "product for geometric mean",
    ),
    Mutant(
        CORR,
        "proximal, behaviour = proximal_logprobs.detach(), behaviour_logprobs.detach()",
        "proximal, behaviour = proximal_logprobs, behaviour_logprobs",
        "weights differentiated",
    ),
    Mutant(
        CORR,
        "working(proximal) - working(behaviour))",
        "working(behaviour) - working(proximal))",
        "ratio upside down",
    ),
    Mutant(
        CORR, "(advantages < 0) & (summed", "(advantages > 0) & (summed", "off-policy mask on the wrong sign"
    ),
    Mutant(
        CORR,
        "trained.sum() ** 2 / (count * square)",
        "trained.sum() ** 2 / square",
        "effective sample size not a share",
    ),
    # critic, distillation, domains, Kimi
    Mutant(
        "critic.py",
        "error = torch.maximum(error, clipped)",
        "error = torch.minimum(error, clipped)",
        "value clip takes the smaller",
    ),
    Mutant("critic.py", "0.5 * error", "error", "value loss doubled"),
    Mutant(
        "distillation.py",
        "return exact_kl(teacher, student)",
        "return exact_kl(student, teacher)",
        "forward and reverse swapped at β = 0",
    ),
    Mutant(
        "distillation.py",
        "torch.logaddexp(p + math.log(beta), q + math.log1p(-beta))",
        "torch.logaddexp(q + math.log(beta), p + math.log1p(-beta))",
        "mixture weights swapped",
    ),
    Mutant(
        "distillation.py",
        "working(teacher) - working(student))",
        "working(student) - working(teacher))",
        "distillation pushes away",
    ),
    Mutant(
        "domains.py",
        "weight, a = token_counts.double(), advantages.double()",
        "weight, a = torch.ones_like(advantages).double(), advantages.double()",
        "trajectories for tokens",
    ),
    Mutant(
        "mirror.py",
        "rewards - baseline - tau * log_ratio",
        "rewards - baseline + tau * log_ratio",
        "sign of the leash",
    ),
    # log-probabilities
    Mutant(
        LOGP,
        "targets, target_mask = token_ids[:, 1:], mask[:, 1:]",
        "targets, target_mask = token_ids[:, 1:], mask[:, :-1]",
        "mask not shifted with the targets",
    ),
    Mutant(
        LOGP,
        "target_mask & (segment_ids[:, 1:] == segment_ids[:, :-1])",
        "target_mask",
        "packing crosses documents",
    ),
    Mutant(
        LOGP, "return z if temperature == 1.0 else z.div_(temperature)", "return z", "temperature ignored"
    ),
    Mutant(
        LOGP,
        "return slope if temperature == 1.0 else slope.div_(temperature)",
        "return slope",
        "temperature missing in the gradient",
    ),
    Mutant(
        LOGP,
        "slopes[rows] = (head[targets[rows]].to(dtype) - expected.to(dtype)) / settings[0]",
        "slopes[rows] = head[targets[rows]].to(dtype) - expected.to(dtype)",
        "temperature missing with a frozen head",
    ),
    Mutant(LOGP, "(logp + entropy.unsqueeze(-1))", "logp", "entropy gradient without H"),
    Mutant(
        LOGP,
        "1 - (z * (temperature / soft_cap)) ** 2",
        "1 - (z / soft_cap) ** 2",
        "slope of the cap at the wrong temperature",
    ),
    Mutant(
        LOGP,
        "z.gather(-1, targets[rows].unsqueeze(-1)).squeeze(-1) - log_total",
        "z.gather(-1, targets[rows].unsqueeze(-1)).squeeze(-1) / settings[0] - log_total",
        "temperature twice",
    ),
    Mutant(
        LOGP,
        "torch.linalg.vecdot(p, z) / total",
        "torch.linalg.vecdot(p, z)",
        "entropy of masses not normalised",
    ),
    Mutant(
        LOGP,
        "lse[rows] = log_total + top.squeeze(-1)",
        "lse[rows] = log_total",
        "maximum forgotten in the normaliser",
    ),
    # estimators
    Mutant(
        EST,
        "1.0 - math.comb(samples - correct, k) / math.comb(samples, k)",
        "1.0 - ((samples - correct) / samples) ** k",
        "biased pass@k",
    ),
    Mutant(
        EST,
        "math.comb(i - 1, k - 1) / draws",
        "math.comb(i, k - 1) / draws",
        "off by one in max@k",
    ),
    Mutant(
        EST,
        "return math.log(n) - (n - 1) / n",
        "return math.log(n)",
        "KL of best-of-n without its second term",
    ),
    Mutant(
        EST,
        "return max(totals, key=lambda answer: totals[answer])",
        "return max(reversed(totals), key=lambda answer: totals[answer])",
        "ties to the last",
    ),
    Mutant(
        EST,
        "range(voters // 2 + 1, voters + 1)",
        "range(voters // 2, voters + 1)",
        "half counted as majority",
    ),
    Mutant(
        EST,
        "tilted = ref.log() + working(rewards) / beta",
        "tilted = ref.log() + working(rewards) * beta",
        "β upside down",
    ),
    Mutant(
        OVER, "distance = math.exp(alpha / beta - 1)", "distance = math.exp(alpha / beta)", "peak at the zero"
    ),
    Mutant(
        OVER,
        "return Curve(float(y.mean() - slope * x.mean()), float(-slope))",
        "return Curve(float(y.mean() - slope * x.mean()), float(slope))",
        "sign of the fitted β",
    ),
    Mutant(
        "supervised.py",
        "losses = losses * chosen.detach().exp()",
        "losses = losses * chosen.exp()",
        "DFT weight differentiated",
    ),
    Mutant(
        "../diagnostics/signals.py",
        "marginal = torch.logsumexp(ell, dim=1) - bound",
        "marginal = torch.logsumexp(ell, dim=1)",
        "marginal without 1/N",
    ),
    Mutant(
        "../diagnostics/signals.py",
        "(before < threshold)",
        "(before <= threshold)",
        "one group too many at the threshold",
    ),
]
