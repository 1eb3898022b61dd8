"""How good a model is, on tasks it was not trained on: counts, curves over samples, comparisons."""

from stepladder.evaluation.held_out import Evaluation, WithExamples, evaluate, held_out, summarise

__all__ = ["Evaluation", "WithExamples", "evaluate", "held_out", "summarise"]
