"""The two-turn world: a hidden digit, a search that reveals it, and a guess that ends the episode.

Reward: 1 for the right digit, plus `bonus` (0.15) for having searched, whatever the guess was. A second
search counts as a wrong guess; by default it keeps the bonus, as the toy loop this comes from does, and
`strict=True` gives it 0.

Two ways to act. In plain mode (the default), for a tiny model with an alphabet of its own, an assistant
message "S" searches, "0" to "4" guesses, and the digit comes back as a user message. In tool mode
(`plain=False`) searching is a call of the tool `search`.
"""

from __future__ import annotations

import random

from stepladder.boundary import require_index
from stepladder.environments.tools import ToolBox, tool
from stepladder.errors import ConfigError
from stepladder.types import Message, Reset, Step, Task, Tool, ToolCall

QUESTION = "?"
SEARCH = "S"


class HiddenDigitWorld:
    """Digits by (seed, split, index). Both splits hold the same few secrets: nothing can be memorised,
    because the question never changes.

    digits: how many there are, 2 to 10. bonus: for having searched. strict: a second search earns nothing.
    """

    disjoint_splits = False  # see the docstring; check_environment reads this

    def __init__(
        self,
        *,
        digits: int = 5,
        bonus: float = 0.15,
        strict: bool = False,
        plain: bool = True,
        seed: int = 0,
        train: int = 100_000,
        test: int = 1_000,
    ) -> None:
        if not 2 <= digits <= 10:
            raise ConfigError(f"digits must be between 2 and 10, such as 5; got {digits}")
        self.digits = digits
        self.bonus = bonus
        self.strict = strict
        self.plain = plain
        self.seed = seed
        self.sizes = {"train": train, "test": test}

    def splits(self) -> tuple[str, ...]:
        return tuple(self.sizes)

    def count(self, split: str) -> int:
        return self.sizes[split]

    def get(self, split: str, i: int) -> Task:
        require_index(self.count(split), split, i)
        digit = random.Random(f"{self.seed}/{split}/{i}").randrange(self.digits)
        return Task(
            id=f"{split}/{i}",
            split=split,
            domain="hidden_digit",
            messages=(Message("user", QUESTION),),
            reference=str(digit),
            seed=i,
        )

    def setup(self) -> None:
        """Nothing is shared."""

    def teardown(self) -> None:
        """Nothing is shared."""

    def make(self) -> HiddenDigitEnvironment:
        return HiddenDigitEnvironment(bonus=self.bonus, strict=self.strict, plain=self.plain)

    @property
    def tools(self) -> tuple[Tool, ...]:
        return self.make().tools

    def demonstrations(self, count: int, seed: int = 0) -> list[list[Message]]:
        """Conversations of uniformly random actions: they show the format, and are right by chance only.

        As in the toy, each turn draws one of `digits + 1` actions; an episode has at most two turns.
        """
        rng = random.Random(f"{self.seed}/demonstration/{seed}")
        actions = [SEARCH, *(str(digit) for digit in range(self.digits))]
        out = []
        for _ in range(count):
            digit, first, second = str(rng.randrange(self.digits)), rng.choice(actions), rng.choice(actions)
            messages = [Message("user", QUESTION), self._act(first)]
            if first == SEARCH:
                messages += [self._observation(digit), self._act(second)]
            out.append(messages)
        return out

    def _act(self, action: str) -> Message:
        if action == SEARCH and not self.plain:
            return Message("assistant", tool_calls=(ToolCall("search", {}, id="call_0"),))
        return Message("assistant", action)

    def _observation(self, digit: str) -> Message:
        if self.plain:
            return Message("user", digit)
        return Message("tool", digit, tool_call_id="call_0", name="search")


class HiddenDigitEnvironment:
    """One hidden digit, which is the task's reference."""

    inline = True

    def __init__(self, *, bonus: float = 0.15, strict: bool = False, plain: bool = True) -> None:
        self.bonus = bonus
        self.strict = strict
        self.plain = plain
        self._digit = ""
        self._searches = 0
        self._toolbox = ToolBox([] if plain else [self.search])

    @property
    def tools(self) -> tuple[Tool, ...]:
        return self._toolbox.tools

    @tool(inline=True)
    def search(self) -> str:
        """Reveal the hidden digit."""
        self._searches += 1
        return self._digit

    async def reset(self, task: Task, *, seed: int) -> Reset:
        self._digit = str(task.reference)
        self._searches = 0
        return Reset(task.messages, self.tools)

    async def step(self, message: Message) -> Step:
        if not self._digit:
            raise RuntimeError("step() before reset(): call reset(task, seed=0) first")
        if message.tool_calls:
            return await self._called(message)
        action = message.text.strip()
        if self.plain and action == SEARCH:
            self._searches += 1
            if self._searches == 1:
                return Step((Message("user", self._digit),))
        return self._ended(action)

    async def _called(self, message: Message) -> Step:
        results = await self._toolbox.call_all(message.tool_calls)
        if self._searches > 1:
            return self._ended("", results)
        return Step(results, info=self._toolbox.info())

    def _ended(self, guess: str, messages: tuple[Message, ...] = ()) -> Step:
        """The guess ends the episode; a second search arrives here as a guess that is never right."""
        correct = float(guess == self._digit)
        earned = self._searches == 1 or (self._searches > 1 and not self.strict)
        searched = self.bonus if earned else 0.0
        return Step(
            messages,
            reward=correct + searched,
            terminated=True,
            rewards={"correct": correct, "searched": searched},
        )

    async def close(self) -> None:
        """Nothing to release."""
