"""Does what the policy says depend on what it was asked? Told from the sampled ids alone.

Each response is attributed to the prompt whose other responses it resembles most. Where responses do not
depend on their prompts this succeeds by chance only, however varied they are. It is a lower bound in spirit
(a dependence that single tokens and pairs do not show is missed); the mutual information itself takes the
policy's log-probabilities of each response under every prompt, see `signals.template_collapse`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from stepladder.diagnostics.variety import open_groups
from stepladder.types import Group

Ids = tuple[int, ...]


def responses(groups: Sequence[Group]) -> dict[Ids, list[Ids]]:
    """Prompt -> what was sampled after it, over open groups, at the first turn whose prompts differ.

    Prompts with fewer than two responses are left out; empty where fewer than two prompts are left.
    """
    played = [t for members in open_groups(groups) for t in members]
    for k in range(max((len(t.turns) for t in played), default=0)):
        table: dict[Ids, list[Ids]] = {}
        for t in played:
            if len(t.turns) > k and t.turns[k].token_ids:
                table.setdefault(t.turns[k].prompt_ids, []).append(t.turns[k].token_ids)
        several = {prompt: said for prompt, said in table.items() if len(said) >= 2}
        if len(several) >= 2:
            return several
        if len(table) >= 2:  # they differ, but nobody was asked the same twice
            return {}
    return {}


def prompt_retrieval(groups: Sequence[Group]) -> float:
    """How much better than chance responses are attributed to their prompts: 0 chance, 1 always.

    NaN where there are not two prompts with two responses each.
    """
    table = responses(groups)
    return retrieval(list(table.values())) if table else math.nan


def retrieval(classes: Sequence[Sequence[Ids]], *, smoothing: float = 0.1) -> float:
    """(accuracy − 1/N) / (1 − 1/N), at least 0, of a leave-one-out naive Bayes over tokens and pairs.

    classes[j]: the responses of prompt j, at least two each and at least two classes. Ties share the hit.

    >>> retrieval([[(1, 2), (1, 3)], [(4, 2), (4, 3)]])
    1.0
    >>> retrieval([[(1, 2), (1, 2)], [(1, 2), (1, 2)]])
    0.0
    """
    if len(classes) < 2 or min(map(len, classes)) < 2:
        raise ValueError(
            f"need at least two prompts with two responses each; got {[len(c) for c in classes]} responses"
        )
    counts = [Counter(f for text in members for f in _features(text)) for members in classes]
    vocabulary = len(set().union(*counts))
    totals = [sum(c.values()) for c in counts]
    hits = trials = 0.0
    for own, members in enumerate(classes):
        for text in members:
            features = Counter(_features(text))
            scores = [
                _score(features, counts[j], totals[j], vocabulary, smoothing, without=j == own)
                for j in range(len(classes))
            ]
            best = max(scores)
            winners = [j for j, score in enumerate(scores) if score >= best - 1e-9]
            hits += (own in winners) / len(winners)
            trials += 1
    chance = 1 / len(classes)
    return max(0.0, (hits / trials - chance) / (1 - chance))


def _features(text: Ids) -> list[object]:
    return [*text, *pairwise(text)]


def _score(
    features: Counter[object],
    counts: Counter[object],
    total: int,
    vocabulary: int,
    smoothing: float,
    *,
    without: bool,
) -> float:
    """log p of the features under one prompt's other responses."""
    denominator = math.log(total - (features.total() if without else 0) + smoothing * vocabulary)
    out = 0.0
    for feature, times in features.items():
        seen = counts[feature] - (times if without else 0)
        out += times * (math.log(seen + smoothing) - denominator)
    return out
