"""Template collapse (RAGEN-2, arXiv:2604.06268): varied text that no longer depends on the prompt.

Entropy looks healthy, so only the dependence itself shows it: the mutual information of prompt and response,
or, from ids alone, how often a response can be attributed to its prompt.
"""

from __future__ import annotations

from stepladder.diagnostics.alarm import Change, Detector, Evidence, Metrics, Smoothed


class TemplateCollapse(Detector):
    """Dependence on the prompt below half of what it was, while the text stays as varied as before.

    `prompt_information` (mutual information over its bound ln N, from cross-scored log-probabilities) is
    asked where it is measured, else `prompt_retrieval`. A policy that never depended on its prompts (a peak
    below `floor`) has nothing to lose; one that lost its entropy too is a case for the other alarms.
    """

    name = "template_collapse"
    averages = ("prompt_information", "prompt_retrieval", "surprisal")
    floor = 0.3
    patience = 3  # measurements: once information has fallen it is measured in each step
    message = "responses stay varied but depend less and less on their prompts"
    advice = (
        "let the task outweigh noise and regularisers: do not divide advantages by their deviation "
        "(rl.credit.scale = 'none'), which blows up groups whose rewards hardly differ; rl.kl.coefficient = "
        "0 and rl.entropy.coefficient = 0"
    )
    remedy = (
        Change("credit.scale", "set", "none"),
        Change("kl.coefficient", "set", 0.0),
        Change("entropy.coefficient", "set", 0.0),
    )

    def __init__(self) -> None:
        super().__init__()
        self.smooth["prompt_information"] = Smoothed(weight=0.5, settle=1)  # seldom, and little noise
        self.smooth["prompt_retrieval"] = Smoothed(settle=5)

    def judge(self, metrics: Metrics) -> Evidence | None:
        information, retrieval = self.smooth["prompt_information"], self.smooth["prompt_retrieval"]
        asked = information if information.count else retrieval
        surprisal = self.smooth["surprisal"]
        if asked.value is None or (asked.peak or 0.0) < self.floor or asked.of_peak >= 0.5:
            return None
        if surprisal.of_peak < 0.7:  # a policy that settles loses both: a random one, as soon as it learns
            return None
        name = "prompt_information" if asked is information else "prompt_retrieval"
        return {
            name: asked.value,
            f"{name}_peak": asked.peak or 0.0,
            "surprisal": surprisal.value or 0.0,
            "surprisal_peak": surprisal.peak or 0.0,
        }
