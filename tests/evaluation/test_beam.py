"""Search led by a step scorer: on a tree whose best leaf is known, and in an episode."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

import pytest

from stepladder.commands import evaluate as evaluate_command
from stepladder.data.chat.renderer import Renderer
from stepladder.data.chat.tiny_tokenizer import tiny_tokenizer
from stepladder.engines.scripted import ScriptedEngine, ScriptedRequest
from stepladder.errors import ConfigError, RewardError
from stepladder.evaluation.beam import Beam, BeamAgent, Partial, beam_search
from stepladder.rewards.reward import Reward
from stepladder.types import Message


async def digit(partial: Partial, seed: int) -> Partial:
    """One random digit more; four make a whole solution."""
    ids = (*partial.token_ids, seed % 10)
    return Partial(ids, "".join(map(str, ids)), len(ids) == 4)


def last_digit(texts: Sequence[str]) -> list[float]:
    return [float(t[-1]) for t in texts]


def search(beam: Beam, seed: int = 0) -> tuple[Partial, ...]:
    return asyncio.run(beam_search(digit, last_digit, beam, max_steps=9, seed=seed))


def test_what_is_kept_is_the_best_of_each_step() -> None:
    """N = 16, M = 4: the 4 best of 16 each time, so digits near 9 all along; unguided sampling has mean 4.5.

    The largest 4 of 16 uniform digits have mean above 7 with near certainty; over ten seeds the mean digit
    of the winners lies above 8.
    """
    found = [search(Beam(16, 4), seed) for seed in range(10)]
    assert all(len(kept) == 4 and all(p.done for p in kept) for kept in found)
    digits = [int(d) for kept in found for d in kept[0].text]
    assert sum(digits) / len(digits) > 8
    alone = [int(d) for seed in range(40) for d in search(Beam(1, 1), seed)[0].text]
    assert 3.5 < sum(alone) / len(alone) < 5.5


def test_the_search_repeats_and_counts_its_samples() -> None:
    """16 first steps, then 4 kept times 4: 64 calls for four digits."""
    calls = 0

    async def counted(partial: Partial, seed: int) -> Partial:
        nonlocal calls
        calls += 1
        return await digit(partial, seed)

    one = asyncio.run(beam_search(counted, last_digit, Beam(16, 4), max_steps=9, seed=3))
    assert calls == 64
    assert one == search(Beam(16, 4), 3)


def test_a_finished_solution_stays_only_while_it_scores() -> None:
    """It ended early with 5; what goes on reaches 6 and pushes it out."""

    async def extend(partial: Partial, seed: int) -> Partial:
        if not partial.text:
            return Partial((1,), "end" if seed % 2 else "go", bool(seed % 2))
        return Partial((1, 2), partial.text + "on", True)

    def score(texts: Sequence[str]) -> list[float]:
        return [{"end": 5.0, "go": 5.0, "goon": 6.0}[t] for t in texts]

    kept = asyncio.run(beam_search(extend, score, Beam(16, 8), max_steps=4, seed=0))
    assert [p.text for p in kept] == ["goon", "goon"]


def test_a_scorer_that_miscounts_is_refused() -> None:
    with pytest.raises(RewardError, match="1 scores for 16"):
        asyncio.run(beam_search(digit, lambda texts: [1.0], Beam(16, 4), max_steps=2, seed=0))
    with pytest.raises(ConfigError, match="multiple of the second"):
        Beam(10, 4)


def test_an_agent_says_the_solution_that_the_scorer_prefers() -> None:
    """The engine offers an a or a b by seed, then ends; the scorer wants b."""
    renderer = Renderer(tiny_tokenizer())
    stop = renderer.stop_token_ids[0]
    a, b = (renderer.tokenizer.encode(c, add_special_tokens=False)[-1] for c in "ab")

    def script(request: ScriptedRequest) -> list[int]:
        return [a if request.sampling.seed % 2 else b, stop]

    engine = ScriptedEngine(script)

    def wants_b(messages: Sequence[Message], partials: Sequence[str]) -> list[float]:
        assert messages[-1].text == "a or b?"
        return [float("b" in p) for p in partials]

    agent = BeamAgent(
        engine, renderer, "0", wants_b, Beam(8, 4), temperature=1.0, max_tokens=8, max_context=200
    )
    agent.begin([Message("user", "a or b?")], [])
    act = asyncio.run(agent.act(2))
    assert act.message is not None
    assert (act.message.text, act.finish_reason) == ("b", "stop")
    assert engine.open_sessions == 0
    (turn,) = agent.record("t", "g").turns
    assert turn.token_ids == (b, stop)


def test_a_process_reward_model_is_a_step_scorer(monkeypatch: pytest.MonkeyPatch) -> None:
    """It sees the conversation with the unfinished answer; what it cannot score comes last."""

    class Model:
        def scores(self, conversations: Sequence[Sequence[Message]]) -> list[float | None]:
            assert [c[0].text for c in conversations] == ["?", "?"]
            return [None if c[-1].text == "" else 0.5 for c in conversations]

    asked: list[str] = []

    def loaded(text: str) -> Reward:
        asked.append(text)
        return Reward("prm", Model(), "group")  # type: ignore[arg-type]

    monkeypatch.setattr(evaluate_command, "model_reward", loaded)
    score = evaluate_command.step_scorer("process_reward_model:runs/prm?aggregation=last")
    assert score([Message("user", "?")], ["a", ""]) == [0.5, -math.inf]
    assert asked == ["process_reward_model:runs/prm?aggregation=last"]
