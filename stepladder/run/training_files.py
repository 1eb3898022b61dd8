"""Episodes as rows of training files: OpenAI chat messages with their tools, as any trainer reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stepladder.recipe.rejection_sampling import RejectionSamplingSection
from stepladder.rewards.reward import prompt_length
from stepladder.types import Message, Trajectory

ACCEPTED, PAIRS = RejectionSamplingSection.rows


def accepted_row(trajectory: Trajectory) -> dict[str, Any]:
    """A conversation to imitate: {"messages", "tools"} and where it came from."""
    return {
        "messages": chat(trajectory.messages),
        "tools": [tool.to_dict() for tool in trajectory.tools],
        "task": trajectory.task.id,
        "domain": trajectory.task.domain,
        "score": trajectory.score.value,
    }


def pair_row(better: Trajectory, worse: Trajectory) -> dict[str, Any]:
    """Two episodes of one task: {"prompt", "chosen", "rejected", "tools"} and their scores."""
    n = prompt_length(better)
    return {
        "prompt": chat(better.messages[:n]),
        "chosen": chat(better.messages[n:]),
        "rejected": chat(worse.messages[n:]),
        "tools": [tool.to_dict() for tool in better.tools],
        "task": better.task.id,
        "score_chosen": better.score.value,
        "score_rejected": worse.score.value,
    }


def chat(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """OpenAI dictionaries; arguments of calls are objects, as chat templates take them.

    A call that could not be read is no call in them: the message is what was really said, as text.
    """
    return [
        {"role": "assistant", "content": m.raw if m.raw is not None else m.text}
        if any(call.error is not None for call in m.tool_calls)
        else m.to_dict()
        for m in messages
    ]
