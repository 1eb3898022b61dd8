"""Search over partial solutions, led by a scorer of steps such as a process reward model (arXiv:2408.03314).

sample N first steps -> keep the best N/M -> sample M continuations of each -> keep the best N/M -> ...
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from stepladder.data.chat.renderer import Renderer
from stepladder.engines.engine import Engine
from stepladder.errors import ConfigError, RewardError
from stepladder.play.agent import Act, Agents
from stepladder.play.policy_agent import PolicyAgent
from stepladder.play.rollout import derive_seed
from stepladder.types import Generation, Message, Sampling

StepScorer = Callable[[Sequence[Message], Sequence[str]], Sequence[float]]
"""(conversation so far, partial solutions) -> how promising each is; higher is better."""


@dataclass(frozen=True, slots=True)
class Beam:
    """`num_samples` (N) continuations per step, of which one in `width` (M) is kept; M divides N."""

    num_samples: int = 16
    width: int = 4
    step_tokens: int = 64
    separator: str = "\n"

    def __post_init__(self) -> None:
        if self.width < 1 or self.num_samples < 1 or self.num_samples % self.width:
            raise ConfigError(
                f"a beam of {self.num_samples} samples cannot keep one in {self.width}; the first must be a "
                f"multiple of the second, for example 16 and 4"
            )


@dataclass(frozen=True, slots=True)
class Partial:
    """A solution so far. It is `done` when the model ended it. `score` is that of its last step."""

    token_ids: tuple[int, ...] = ()
    text: str = ""
    done: bool = False
    score: float = -math.inf


Extend = Callable[[Partial, int], Awaitable[Partial]]
Score = Callable[[Sequence[str]], Sequence[float]]


async def beam_search(
    extend: Extend, score: Score, beam: Beam, *, max_steps: int, seed: int
) -> tuple[Partial, ...]:
    """Return the kept solutions, the best first; `extend(partial, seed)` samples one more step.

    A finished solution keeps its place as long as its score does. Among equals the one sampled first stays.
    Ends when all that is kept is finished, or after `max_steps`.
    """
    keep = beam.num_samples // beam.width
    kept: tuple[Partial, ...] = ()
    for step in range(max_steps):
        roots = [Partial()] * beam.num_samples if not kept else [p for p in kept if not p.done]
        copies = 1 if not kept else beam.width
        jobs = [
            extend(root, derive_seed(seed, step, i, c)) for i, root in enumerate(roots) for c in range(copies)
        ]
        fresh = list(await asyncio.gather(*jobs))
        scores = score([p.text for p in fresh])
        if len(scores) != len(fresh) or any(math.isnan(s) for s in scores):
            raise RewardError(
                f"the step scorer gave {len(scores)} scores for {len(fresh)} partial solutions, or NaN; "
                "return one number for each, in order"
            )
        fresh = [replace(p, score=float(s)) for p, s in zip(fresh, scores, strict=True)]
        pool = [p for p in kept if p.done] + fresh
        kept = tuple(sorted(pool, key=lambda p: -p.score)[:keep])
        if all(p.done for p in kept):
            break
    return kept


class BeamAgent(PolicyAgent):
    """Each of its turns is the best solution of a search. For evaluation: it keeps no log-probabilities."""

    def __init__(
        self,
        engine: Engine,
        renderer: Renderer,
        key: str,
        scorer: StepScorer,
        beam: Beam,
        *,
        temperature: float,
        max_tokens: int,
        max_context: int,
    ) -> None:
        self.engine, self.key, self.scorer, self.beam = engine, key, scorer, beam
        self.renderer = renderer
        self.temperature, self.max_tokens, self.max_context = temperature, max_tokens, max_context
        self.conversation = None

    async def act(self, seed: int) -> Act:
        assert self.conversation is not None
        conversation, prompt = self.conversation, self.conversation.prompt_ids
        room = min(self.max_tokens, self.max_context - len(prompt))
        if room < 1:
            return Act(None, "context")
        calls = 0

        async def extend(partial: Partial, own_seed: int) -> Partial:
            nonlocal calls
            calls += 1
            sampling = Sampling(
                temperature=self.temperature,
                max_tokens=min(self.beam.step_tokens, room - len(partial.token_ids)),
                stop_token_ids=tuple(self.renderer.stop_token_ids),
                seed=own_seed,
            )
            if sampling.max_tokens < 1:  # no room left: it stays as it is, unfinished
                return partial
            with self.engine.session(f"{self.key}/{calls:06d}") as session:
                generation = await session.generate([*prompt, *partial.token_ids], sampling)
            return self._one_step(partial, generation)

        def score(texts: Sequence[str]) -> Sequence[float]:
            return self.scorer(conversation.messages, texts)

        best, *_ = await beam_search(extend, score, self.beam, max_steps=room, seed=seed)
        reason = "stop" if best.done else "length"
        ids = best.token_ids
        generation = Generation(ids, (0.0,) * len(ids), ((0, len(ids)),), reason)  # type: ignore[arg-type]
        sampling = Sampling(temperature=self.temperature, max_tokens=self.max_tokens, seed=seed)
        return Act(conversation.add_turn(generation, sampling), reason)

    def _one_step(self, partial: Partial, generation: Generation) -> Partial:
        """Return what was sampled, up to the first token that holds the separator."""
        ids: list[int] = []
        for token in generation.token_ids:
            ids.append(token)
            if self.beam.separator in self.renderer.decode([token]):
                break
        done = generation.finish_reason == "stop" and len(ids) == len(generation.token_ids)
        whole = (*partial.token_ids, *ids)
        shown = whole[:-1] if done else whole
        return Partial(whole, self.renderer.decode(shown), done)

    def close(self) -> None:
        """Do nothing: every step closed its own session."""


def beam_agents(
    engine: Engine,
    renderer: Renderer,
    scorer: StepScorer,
    beam: Beam,
    *,
    temperature: float,
    max_tokens: int,
    max_context: int,
) -> Agents:
    """Return agents that search in `engine`."""

    def make(key: str) -> BeamAgent:
        return BeamAgent(
            engine,
            renderer,
            key,
            scorer,
            beam,
            temperature=temperature,
            max_tokens=max_tokens,
            max_context=max_context,
        )

    return make
