"""Trajectories as plain JSON, and back. Strict JSON: a number that is none (NaN, infinity) becomes null."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stepladder.data.prefix import common_prefix
from stepladder.evaluation import Evaluation
from stepladder.types import (
    Content,
    Failure,
    ImagePart,
    Message,
    Sampling,
    Score,
    Task,
    TextPart,
    ToolCall,
    TrainingSample,
    Trajectory,
    Turn,
)


def to_json(value: Any) -> Any:
    """`value` with only JSON types inside: tuples become lists, numpy and torch scalars numbers, NaN None.

    Anything else becomes its `repr`, so that an odd value in an environment's info cannot end a run.
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((to_json(item) for item in value), key=repr)
    if hasattr(value, "tolist"):  # numpy and torch, scalars and arrays
        return to_json(value.tolist())
    return repr(value)


def encode_line(value: Any) -> bytes:
    """One line of a .jsonl file. ASCII only, so that no character of a model's text can break a line."""
    return json.dumps(to_json(value), allow_nan=False).encode("ascii") + b"\n"


def trajectory_to_dict(
    trajectory: Trajectory,
    *,
    decode: Callable[[Sequence[int]], str] | None = None,
    samples: bool = False,
) -> dict[str, Any]:
    """A trajectory as JSON. Turn prompts are stored as what they add to the tokens before them.

    `decode` (ids to text, special tokens shown) adds the text of each sampled token, for the reports.
    `samples=True` keeps the training samples too, for groups that wait in a checkpoint.
    """
    out = {
        "id": trajectory.id,
        "group_id": trajectory.group_id,
        "task": task_to_dict(trajectory.task),
        "messages": [message_to_dict(message) for message in trajectory.messages],
        "turns": _turns_to_dicts(trajectory.turns, decode),
        "rewards": list(trajectory.rewards),
        "score": {
            "value": trajectory.score.value,
            "parts": dict(trajectory.score.parts),
            "explanation": trajectory.score.explanation,
        },
        "stop_reason": trajectory.stop_reason,
        "failure": _failure_to_dict(trajectory.failure),
        "seconds": trajectory.seconds,
        "info": dict(trajectory.info),
        "success": trajectory.success,
    }
    if samples:
        out["samples"] = [_sample_to_dict(sample) for sample in trajectory.samples]
    return dict(to_json(out))


def trajectory_from_dict(record: Mapping[str, Any]) -> Trajectory:
    """The trajectory that `trajectory_to_dict` wrote. Raises KeyError or TypeError for anything else."""
    return Trajectory(
        id=record["id"],
        group_id=record["group_id"],
        task=task_from_dict(record["task"]),
        turns=_turns_from_dicts(record["turns"]),
        messages=tuple(message_from_dict(message) for message in record["messages"]),
        rewards=tuple(record["rewards"]),
        score=Score(**record["score"]),
        stop_reason=record["stop_reason"],
        failure=Failure(**record["failure"]) if record["failure"] else None,
        seconds=record["seconds"],
        samples=tuple(_sample_from_dict(sample) for sample in record.get("samples", ())),
        info=record["info"],
        success=record.get("success", record["info"].get("success")),  # older files have it in info
    )


def message_to_dict(message: Message) -> dict[str, Any]:
    """A message with everything it holds (`Message.to_dict` is for chat templates); defaults left out."""
    out: dict[str, Any] = {"role": message.role, "content": _content_to_json(message.content)}
    if message.tool_calls:
        out["tool_calls"] = [
            {"name": c.name, "arguments": dict(c.arguments), "id": c.id, "error": c.error, "raw": c.raw}
            for c in message.tool_calls
        ]
    for key in ("tool_call_id", "name", "reasoning", "raw"):
        if getattr(message, key) is not None:
            out[key] = getattr(message, key)
    return out


def message_from_dict(record: Mapping[str, Any]) -> Message:
    """The message that `message_to_dict` wrote."""
    fields = dict(record)
    content = fields.pop("content")
    if not isinstance(content, str):
        content = tuple(TextPart(p["text"]) if "text" in p else ImagePart(p["image"]) for p in content)
    calls = tuple(ToolCall(**call) for call in fields.pop("tool_calls", ()))
    return Message(content=content, tool_calls=calls, **fields)


def _content_to_json(content: Content) -> Any:
    if isinstance(content, str):
        return content
    return [{"text": p.text} if isinstance(p, TextPart) else {"image": p.url} for p in content]


def task_to_dict(task: Task) -> dict[str, Any]:
    """A task as JSON."""
    return {
        "id": task.id,
        "split": task.split,
        "domain": task.domain,
        "messages": [message_to_dict(message) for message in task.messages],
        "reference": task.reference,
        "seed": task.seed,
        "data": dict(task.data),
    }


def task_from_dict(record: Mapping[str, Any]) -> Task:
    """The task that `task_to_dict` wrote."""
    messages = tuple(message_from_dict(message) for message in record["messages"])
    return Task(**{**record, "messages": messages})


def _turns_to_dicts(
    turns: Sequence[Turn], decode: Callable[[Sequence[int]], str] | None
) -> list[dict[str, Any]]:
    """Turn k+1 usually starts with all tokens of turn k; `keep` says how many, so files grow linearly."""
    before: tuple[int, ...] = ()
    out = []
    for turn in turns:
        keep = common_prefix(before, turn.prompt_ids)
        added = turn.prompt_ids[keep:]
        record: dict[str, Any] = {
            "keep": keep,
            "prompt_ids": added,
            "token_ids": turn.token_ids,
            "logprobs": turn.logprobs,
            "sampling": {
                "temperature": turn.sampling.temperature,
                "max_tokens": turn.sampling.max_tokens,
                "stop_token_ids": turn.sampling.stop_token_ids,
                "seed": turn.sampling.seed,
            },
            "versions": turn.versions,
            "finish_reason": turn.finish_reason,
        }
        if decode is not None:
            record["prompt_text"] = decode(added)
            record["token_texts"] = [decode([token]) for token in turn.token_ids]
        out.append(record)
        before = turn.prompt_ids + turn.token_ids
    return out


def _turns_from_dicts(records: Sequence[Mapping[str, Any]]) -> tuple[Turn, ...]:
    before: tuple[int, ...] = ()
    turns = []
    for record in records:
        sampling = dict(record["sampling"])
        sampling["stop_token_ids"] = tuple(sampling["stop_token_ids"])
        turn = Turn(
            prompt_ids=before[: record["keep"]] + tuple(record["prompt_ids"]),
            token_ids=tuple(record["token_ids"]),
            logprobs=tuple(math.nan if p is None else p for p in record["logprobs"]),
            sampling=Sampling(**sampling),
            versions=tuple((version, count) for version, count in record["versions"]),
            finish_reason=record["finish_reason"],
        )
        turns.append(turn)
        before = turn.prompt_ids + turn.token_ids
    return tuple(turns)


def _failure_to_dict(failure: Failure | None) -> dict[str, str] | None:
    if failure is None:
        return None
    return {"boundary": failure.boundary, "kind": failure.kind, "message": failure.message}


def _sample_to_dict(sample: TrainingSample) -> dict[str, Any]:
    return {
        "token_ids": sample.token_ids,
        "mask": sample.mask,
        "behaviour_logprobs": sample.behaviour_logprobs,
        "trajectory_id": sample.trajectory_id,
        "turn_ids": sample.turn_ids,
        "group_id": sample.group_id,
        "images": [image.url for image in sample.images],
    }


def _sample_from_dict(record: Mapping[str, Any]) -> TrainingSample:
    columns = {key: tuple(record[key]) for key in ("token_ids", "mask", "behaviour_logprobs", "turn_ids")}
    return TrainingSample(
        **columns,
        trajectory_id=record["trajectory_id"],
        group_id=record["group_id"],
        images=tuple(ImagePart(url) for url in record["images"]),
    )


def evaluation_record(rung: str, step: int, result: Evaluation, keep: int, decode: Any) -> dict[str, Any]:
    """One line of evaluations.jsonl; examples are spread over the domains."""
    seen: set[str] = set()
    chosen = [
        t
        for t in result.trajectories
        if t.task.domain not in seen and not seen.add(t.task.domain)  # type: ignore[func-returns-value]
    ]
    return {
        "rung": rung,
        "step": step,
        "n": result.n,
        "success": result.success,
        "interval": list(result.interval),
        "tool_rate": result.tool_rate,
        "mean_tokens": result.mean_tokens,
        "failed": result.failed,
        "truncated": result.truncated,
        "by_domain": {d: {"n": n, "success": right / n} for d, (right, n) in result.by_domain.items()},
        "seconds": result.seconds,
        "temperature": result.temperature,
        "outcomes": "".join(str(int(t.solved)) for t in result.trajectories),
        "examples": [trajectory_to_dict(t, decode=decode) for t in chosen[:keep]],
    }
