"""How good a model is, on tasks it was not trained on: counts, curves over samples, comparisons."""

from stepladder.evaluation.few_shot import WithExamples
from stepladder.evaluation.held_out import evaluate, held_out
from stepladder.evaluation.result import Evaluation

__all__ = ["Evaluation", "WithExamples", "evaluate", "held_out"]
