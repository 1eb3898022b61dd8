"""Agentic RL in miniature: a table of 6x6 logits learns to search before it guesses, by reward alone.

A hidden digit, one tool (search) that reveals it, a guess that ends the episode. Reward 1 for the right
digit, plus 0.15 for having searched. Nothing says "you should search": it pays. The update is GRPO, made
of the same functions that train a language model.
"""

import sys

import torch

from stepladder.objectives.advantages import group_advantages
from stepladder.objectives.policy_gradient import clipped_surrogate
from stepladder.objectives.reduce import aggregate, step_denominators

# Contexts: 0 the start, 1..5 "saw digit"; actions: 0 search, 1..5 guess a digit.
SEARCH, GROUP, TASKS, STEPS, BONUS = 0, 12, 8, 400, 0.15


def play(target: int, logp: torch.Tensor) -> tuple[list[tuple[int, int]], float]:
    """One episode: the (context, action) pairs and the reward."""
    steps, context = [], 0
    for _ in range(2):
        action = int(torch.distributions.Categorical(logits=logp[context]).sample())
        steps.append((context, action))
        if action == SEARCH and context == 0:
            context = target + 1  # the observation: not an action, never trained
            continue
        return steps, float(action - 1 == target) + (BONUS if context else 0.0)
    raise AssertionError("the second action always ends the episode")


def main(seed: int = 0) -> tuple[float, float]:
    torch.manual_seed(seed)
    logits = torch.zeros(6, 6, requires_grad=True)
    optimizer = torch.optim.SGD([logits], lr=0.5)
    for step in range(STEPS):
        old = logits.log_softmax(-1).detach()
        pairs, rewards, owner = [], [], []
        for _ in range(TASKS):
            target = int(torch.randint(0, 5, (1,)))
            for _ in range(GROUP):
                steps, reward = play(target, old)
                owner += [len(rewards)] * len(steps)
                pairs += steps
                rewards.append(reward)
        groups = torch.arange(len(rewards)) // GROUP
        scores = torch.tensor(rewards)
        # Equal rewards give exactly 0, whatever the rounding of their mean.
        advantages = group_advantages(scores, groups, eps=1e-8)[torch.tensor(owner)]
        contexts, actions = torch.tensor(pairs).T
        mask = torch.ones(len(pairs), 1, dtype=torch.bool)
        denominators = step_denominators(mask.sum(-1), mode="token_mean")
        for _ in range(2):  # the batch is used twice: the clip matters in the second pass
            logp = logits.log_softmax(-1)[contexts, actions][:, None]
            losses, _ = clipped_surrogate(logp, old[contexts, actions][:, None], advantages, mask)
            optimizer.zero_grad()
            aggregate(losses, mask, denominators).backward()
            optimizer.step()
        if step % 80 == 0 or step == STEPS - 1:
            p = logits.softmax(-1).detach()
            search, right = p[0, SEARCH].item(), sum(p[t + 1, t + 1].item() for t in range(5)) / 5
            mean = scores.view(TASKS, GROUP).mean(1).mean().item()
            print(
                f"step {step:3d}  group reward={mean:.3f}  P(search@start)={search:.3f}  "
                f"P(correct|saw)={right:.3f}"
            )
    return search, right


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
