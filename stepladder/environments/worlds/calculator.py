"""The calculator world: word problems that a small model can solve only by calling a calculator.

Training, validation and test are disjoint by construction: a problem belongs to the split that the hash of
the numbers in its question names, so the same numbers never occur in two splits, in whatever words.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Sequence
from typing import Any

from stepladder.boundary import require_index
from stepladder.data.files.records import Preference
from stepladder.environments.tools import ToolBox, tool
from stepladder.environments.worlds.arithmetic import evaluate, last_number, shown
from stepladder.environments.worlds.families import FAMILIES, MORE_FAMILIES, Family, Problem
from stepladder.environments.worlds.mistakes import mistaken
from stepladder.errors import ConfigError, nearest
from stepladder.types import Message, Reset, Step, Task, Tool, ToolCall

SYSTEM_PROMPT = "Solve the problem. Use the calculator for arithmetic. End with 'Answer: ' and the result."

# Where a hash in [0, 10) puts a problem.
_BUCKETS = {"train": range(0, 7), "validation": range(7, 8), "test": range(8, 10)}


@tool(inline=True)
def calculator(expression: str) -> str:
    """Compute an arithmetic expression.

    Args:
        expression: numbers with + - * / and parentheses, such as "12*(3+4)"
    """
    return shown(evaluate(expression))


class CalculatorWorld:
    """Problems by (seed, split, index), each in the family named by `Task.domain`.

    seed: another seed gives other problems. families: names (of MORE_FAMILIES too) or Family objects;
    FAMILIES by default. call_cost: taken from the reward for each tool call. train, validation, test: how
    many problems each split has. max_calls_per_turn: see ToolBox.
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        families: Sequence[str] | Sequence[Family] | None = None,
        call_cost: float = 0.0,
        train: int = 100_000,
        validation: int = 1_000,
        test: int = 2_000,
        system_prompt: str = SYSTEM_PROMPT,
        max_calls_per_turn: int = 8,
    ) -> None:
        self.seed = seed
        self.families = _chosen(families)
        self.call_cost = call_cost
        self.sizes = {"train": train, "validation": validation, "test": test}
        self.system_prompt = system_prompt
        self.max_calls_per_turn = max_calls_per_turn

    def splits(self) -> tuple[str, ...]:
        return tuple(self.sizes)

    def count(self, split: str) -> int:
        _known_split(split)
        return self.sizes[split]

    def get(self, split: str, i: int) -> Task:
        """Problem `i`: the families take turns, in an order drawn anew for each round of all of them."""
        require_index(self.count(split), split, i)
        round_, turn = divmod(i, len(self.families))
        order = random.Random(f"{self.seed}/{split}/order/{round_}").sample(self.families, len(self.families))
        family = order[turn]
        question, expression, answer = draw(family, split, random.Random(f"{self.seed}/{split}/{i}"))
        return Task(
            id=f"{split}/{i}",
            split=split,
            domain=family.name,
            messages=self.opening(question),
            reference=answer,
            seed=i,
            data={"expression": expression},
        )

    def opening(self, question: str) -> tuple[Message, ...]:
        system = (Message("system", self.system_prompt),) if self.system_prompt else ()
        return (*system, Message("user", question))

    def setup(self) -> None:
        """Nothing is shared."""

    def teardown(self) -> None:
        """Nothing is shared."""

    def make(self) -> CalculatorEnvironment:
        return CalculatorEnvironment(call_cost=self.call_cost, max_calls_per_turn=self.max_calls_per_turn)

    @property
    def tools(self) -> tuple[Tool, ...]:
        return self.make().toolbox.tools

    def demonstrations(self, count: int, seed: int = 0, *, split: str = "train") -> list[list[Message]]:
        """Solved problems of the demonstrated families, in turn, as conversations for a warm start."""
        shown_families = [family for family in self.families if family.demonstrated]
        if not shown_families:
            raise ConfigError(
                f"no family among {[family.name for family in self.families]} is demonstrated; keep one of "
                f"{[family.name for family in FAMILIES if family.demonstrated]}"
            )
        out = []
        for i in range(count):
            rng = random.Random(f"{self.seed}/{split}/demonstration/{seed}/{i}")
            problem = draw(shown_families[i % len(shown_families)], split, rng)
            out.append([*self.opening(problem[0]), *solved(problem)])
        return out

    def preferences(self, count: int, seed: int = 0, *, split: str = "train") -> list[Preference]:
        """Problems of all families in turn, each with its right solution and one with a plausible mistake."""
        out = []
        for i in range(count):
            rng = random.Random(f"{self.seed}/{split}/preference/{seed}/{i}")
            problem = draw(self.families[i % len(self.families)], split, rng)
            good, bad = tuple(solved(problem)), tuple(mistaken(problem, rng))
            out.append(Preference(self.opening(problem[0]), good, bad, self.tools))
        return out


class CalculatorEnvironment:
    """One problem: tool calls are answered; the first message without one is the answer."""

    inline = True

    def __init__(self, *, call_cost: float = 0.0, max_calls_per_turn: int = 8) -> None:
        self.call_cost = call_cost
        self.toolbox = ToolBox([calculator], max_calls_per_turn=max_calls_per_turn)
        self._task: Task | None = None
        self._calls = 0

    async def reset(self, task: Task, *, seed: int) -> Reset:
        self._task, self._calls = task, 0
        return Reset(task.messages, self.toolbox.tools)

    async def step(self, message: Message) -> Step:
        if self._task is None:
            raise RuntimeError("step() before reset(): call reset(task, seed=0) first")
        if message.tool_calls:
            self._calls += len(message.tool_calls)
            results = await self.toolbox.call_all(message.tool_calls)
            return Step(results, info=self.toolbox.info())
        correct = float(is_correct(message.text, str(self._task.reference)))
        parts: dict[str, float | None] = {"correct": correct}
        if self.call_cost:
            parts["calls"] = -self.call_cost * self._calls
        reward = sum(part for part in parts.values() if part is not None)
        return Step(reward=reward, terminated=True, rewards=parts, info=self.toolbox.info())

    async def close(self) -> None:
        """Nothing to release."""


def is_correct(answer: str, reference: str) -> bool:
    """Whether the last number (or the last yes/no) in `answer` is exactly the reference."""
    if reference in ("yes", "no"):
        words = re.findall(r"\b(yes|no)\b", answer.lower())
        return bool(words) and words[-1] == reference
    return last_number(answer) == evaluate(reference)


def draw(family: Family, split: str, rng: random.Random) -> Problem:
    """The first problem that `rng` draws from the family whose numbers belong to `split`."""
    _known_split(split)
    for _ in range(10_000):
        problem = family.generate(rng)
        if split_of(problem[0]) == split:
            return problem
    raise ConfigError(f"family {family.name!r} has no problems in split {split!r}; vary its numbers more")


def split_of(question: str) -> str:
    """The split that the numbers of a question belong to, whatever their order and the words around."""
    numbers = sorted(int(digits) for digits in re.findall(r"\d+", question))
    bucket = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    value = int.from_bytes(bucket, "big") % 10
    return next(split for split, buckets in _BUCKETS.items() if value in buckets)


def solved(problem: Problem) -> list[Message]:
    """What a good assistant does with a problem: call, read the result, answer."""
    _, expression, answer = problem
    final = Message("assistant", f"Answer: {answer}")
    if expression is None:
        return [final]
    call = ToolCall("calculator", {"expression": expression}, id="call_0")
    result = Message("tool", shown(evaluate(expression)), tool_call_id=call.id, name=call.name)
    return [Message("assistant", tool_calls=(call,)), result, final]


def _known_split(split: str) -> None:
    if split not in _BUCKETS:
        raise ConfigError(
            f"the calculator has no split {split!r}.{nearest(split, _BUCKETS)} It has: {', '.join(_BUCKETS)}"
        )


def _chosen(names: Sequence[Any] | None) -> tuple[Family, ...]:
    if names is None:
        return FAMILIES
    known = {family.name: family for family in (*FAMILIES, *MORE_FAMILIES)}
    chosen = []
    for name in names:
        if not isinstance(name, Family) and name not in known:
            raise ConfigError(
                f"there is no family {name!r}.{nearest(str(name), known)} There are: {', '.join(known)}"
            )
        chosen.append(name if isinstance(name, Family) else known[name])
    if not chosen:
        raise ConfigError(f"families is empty; leave it out, or name some of: {', '.join(known)}")
    return tuple(chosen)
