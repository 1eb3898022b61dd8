"""The nouns: plain frozen dataclasses, each with a worked example. No torch here.

One episode, from text to training data:

    Task --reset--> Message(s) --render--> prompt ids --Engine--> Turn
         --parse--> Message with ToolCalls --step--> Message(s), reward --> ... --> Trajectory
    Trajectories of one task make a Group; a Trajectory yields one or more TrainingSamples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

Role: TypeAlias = Literal["system", "user", "assistant", "tool"]
JsonSchema: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TextPart:
    """A piece of text inside a message with several parts."""

    text: str


@dataclass(frozen=True, slots=True)
class ImagePart:
    """An image by reference: a data URL, a file path or a URL. Expanded to pixels in one place only."""

    url: str


Content: TypeAlias = str | tuple[TextPart | ImagePart, ...]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call that the model asked for.

    `error` is set when the call could not be read (broken JSON, a missing name): such a call is never
    executed; the model is told why. `raw` is the text it was read from.

    >>> ToolCall("add", {"a": 1, "b": 2}).name
    'add'
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    id: str = ""
    error: str | None = None
    raw: str = ""


@dataclass(frozen=True, slots=True)
class Message:
    """A role and what it said.

    >>> Message("user", "What is 2 + 3?").to_dict()
    {'role': 'user', 'content': 'What is 2 + 3?'}
    """

    role: Role
    content: Content = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    reasoning: str | None = None
    raw: str | None = None  # the text exactly as sampled, set on assistant messages of a rollout

    @property
    def text(self) -> str:
        """The text of the message; images are left out."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content if isinstance(part, TextPart))

    def to_dict(self) -> dict[str, Any]:
        """An OpenAI chat dictionary, as chat templates and other software expect it."""
        out: dict[str, Any] = {"role": self.role}
        if isinstance(self.content, str):
            out["content"] = self.content
        else:
            out["content"] = [
                {"type": "text", "text": part.text}
                if isinstance(part, TextPart)
                else {"type": "image_url", "image_url": {"url": part.url}}
                for part in self.content
            ]
        if self.tool_calls:
            out["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": dict(call.arguments)},
                }
                for call in self.tool_calls
            ]
        if self.tool_call_id is not None:
            out["tool_call_id"] = self.tool_call_id
        if self.name is not None:
            out["name"] = self.name
        if self.reasoning is not None:
            out["reasoning_content"] = self.reasoning
        return out


@dataclass(frozen=True, slots=True)
class Task:
    """One problem: what the model is shown, and what the grader knows.

    `reference` is hidden from the model. `seed` fixes the environment's random state, shared by the
    siblings of a group. `data` holds whatever else the environment needs, as plain JSON.

    >>> Task("train/0", messages=(Message("user", "2 + 3?"),), reference="5").reference
    '5'
    """

    id: str
    split: str = "train"
    domain: str = "default"
    messages: tuple[Message, ...] = ()
    reference: Any = None
    seed: int = 0
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Tool:
    """A typed function the model may call, described by a JSON schema made from its signature.

    `function` is None for a tool that lives elsewhere (an MCP server, a remote environment).
    """

    name: str
    description: str
    parameters: JsonSchema
    function: Callable[..., Any] | None = field(default=None, compare=False, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """The OpenAI "tools" entry that chat templates render."""
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": dict(self.parameters),
            },
        }


@dataclass(frozen=True, slots=True)
class Score:
    """What an episode or a completion was worth. `value=None` means "could not be scored", never 0.

    `turns`, from a process reward: what each turn was worth; `value` holds their sum.

    >>> Score(1.15, {"correct": 1.0, "searched": 0.15}).value
    1.15
    """

    value: float | None
    parts: Mapping[str, float | None] = field(default_factory=dict)
    explanation: str = ""
    turns: tuple[float, ...] = ()

    @property
    def succeeded(self) -> bool:
        """Whether the part "correct" is 1 or more, or, where there is none, the value."""
        correct = self.parts.get("correct")
        worth = self.value if correct is None else correct
        return worth is not None and worth >= 1.0


@dataclass(frozen=True, slots=True)
class Reset:
    """What an environment answers to `reset`: the opening messages and the tools on offer."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Step:
    """What an environment answers to one assistant message.

    `reward` is this step's reward (None: could not be scored); `rewards` its named parts.
    `terminated`: the environment's own end. `truncated`: cut from outside (a limit), not a failure.
    """

    messages: tuple[Message, ...] = ()
    reward: float | None = 0.0
    terminated: bool = False
    truncated: bool = False
    rewards: Mapping[str, float | None] = field(default_factory=dict)
    info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. `temperature=0` is greedy; no top-p or top-k, which would bias the ratio.

    >>> Sampling(max_tokens=64).temperature
    1.0
    """

    temperature: float = 1.0
    max_tokens: int = 256
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0


# (weight version, how many consecutive tokens it sampled): one turn may span an update.
Versions: TypeAlias = tuple[tuple[int, int], ...]
FinishReason: TypeAlias = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Generation:
    """What an engine returns for one request: ids as sampled, the stop token included.

    `logprobs[t]` is log p(token t) in nats under the sampling temperature, by the weights `versions`
    names. It is kept for good: the behaviour log-probability.

    >>> Generation((7, 2), (-0.1, -0.3), ((0, 2),), "stop").token_ids
    (7, 2)
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: Versions
    finish_reason: FinishReason

    def __post_init__(self) -> None:
        counted = sum(count for _, count in self.versions)
        if not len(self.token_ids) == len(self.logprobs) == counted:
            raise ValueError(
                f"a generation needs one log-probability and one version per token; got "
                f"{len(self.token_ids)} ids, {len(self.logprobs)} log-probabilities, {counted} versions"
            )


@dataclass(frozen=True, slots=True)
class Turn:
    """One model call inside an episode: the exact prompt ids and what was sampled after them."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    sampling: Sampling
    versions: Versions
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an episode broke, with the boundary it broke at. It is recorded, and never counts as reward 0."""

    boundary: Literal["engine", "tool", "environment", "reward"]
    kind: str
    message: str


StopReason: TypeAlias = Literal["terminated", "truncated", "max_turns", "length", "context", "failed"]


@dataclass(frozen=True, slots=True)
class Trajectory:
    """The record of one episode. `rewards[k]` belongs to turn k; `score` is None inside when unscored.

    `tools` are those that the episode began with. `success` is settled once, by what the environment says of
    itself or else by its score, and stays when rewards, bonuses and penalties are added to the score.
    """

    id: str
    group_id: str
    task: Task
    turns: tuple[Turn, ...]
    messages: tuple[Message, ...]
    rewards: tuple[float | None, ...]
    score: Score
    stop_reason: StopReason
    failure: Failure | None = None
    seconds: float = 0.0
    samples: tuple[TrainingSample, ...] = ()
    info: Mapping[str, Any] = field(default_factory=dict)
    tools: tuple[Tool, ...] = ()
    success: bool | None = None

    @property
    def solved(self) -> bool:
        """Whether the episode succeeded; a record in which that was not settled is judged by its score."""
        if self.failure is not None:
            return False
        return self.score.succeeded if self.success is None else self.success

    @property
    def used_tool(self) -> bool:
        """Whether at least one tool call could be read; a malformed one does not count."""
        said = (m for m in self.messages if m.role == "assistant")
        return any(call.error is None for m in said for call in m.tool_calls)

    @property
    def truncated(self) -> bool:
        """Cut from outside, by a limit of the loop or of the environment."""
        return self.stop_reason in ("truncated", "max_turns", "length", "context")

    @property
    def num_sampled_tokens(self) -> int:
        return sum(len(turn.token_ids) for turn in self.turns)

    @property
    def num_tool_calls(self) -> int:
        return sum(len(m.tool_calls) for m in self.messages if m.role == "assistant")

    def with_score(self, score: Score) -> Trajectory:
        """The same episode with another score (a scorer saw the finished group)."""
        return replace(self, score=score)


@dataclass(frozen=True, slots=True)
class Group:
    """Trajectories of the same task instance: same task, same environment seed, different sampling seeds."""

    id: str
    task: Task
    trajectories: tuple[Trajectory, ...]


@dataclass(frozen=True, slots=True)
class TrainingSample:
    """A flat token sequence ready to pack. `mask[i]` is True exactly where the policy sampled token i.

    `behaviour_logprobs[i]` is 0.0 where the mask is False. `turn_ids[i]` is the turn that sampled token
    i, -1 where none did. A trajectory that was split gives several samples with one `trajectory_id`.

    >>> TrainingSample((5, 6, 2), (False, True, True), (0.0, -0.5, -0.1), "t", (-1, 0, 0), "g").num_trained
    2
    """

    token_ids: tuple[int, ...]
    mask: tuple[bool, ...]
    behaviour_logprobs: tuple[float, ...]
    trajectory_id: str
    turn_ids: tuple[int, ...]
    group_id: str
    images: tuple[ImagePart, ...] = ()

    def __post_init__(self) -> None:
        lengths = {
            "token_ids": len(self.token_ids),
            "mask": len(self.mask),
            "behaviour_logprobs": len(self.behaviour_logprobs),
            "turn_ids": len(self.turn_ids),
        }
        if len(set(lengths.values())) != 1:
            raise ValueError(f"the columns of a training sample must have one length; got {lengths}")
        if self.mask and self.mask[0]:
            raise ValueError("the first token of a sample has nothing before it and cannot be trained")

    @property
    def num_trained(self) -> int:
        return sum(self.mask)


Messages: TypeAlias = Sequence[Message]
