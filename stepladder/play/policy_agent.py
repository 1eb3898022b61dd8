"""The policy as an agent: token ids in, token ids out, through an engine."""

from __future__ import annotations

from collections.abc import Sequence

from stepladder.data.chat.conversation import Conversation
from stepladder.data.chat.renderer import Renderer
from stepladder.data.chat.template import images_of
from stepladder.engines.engine import Engine, Session
from stepladder.errors import TemplateError
from stepladder.play.agent import Act, Agent, Agents, Record
from stepladder.types import Message, Sampling, Tool


class PolicyAgent:
    """The policy being trained: token ids in, token ids out, nothing encoded twice."""

    def __init__(
        self,
        session: Session,
        renderer: Renderer,
        *,
        temperature: float,
        max_tokens: int,
        max_context: int,
    ) -> None:
        self.session, self.renderer = session, renderer
        self.temperature, self.max_tokens, self.max_context = temperature, max_tokens, max_context
        self.conversation: Conversation | None = None

    def begin(self, messages: Sequence[Message], tools: Sequence[Tool]) -> None:
        _refuse_images(messages)
        self.conversation = self.renderer.start(messages, tools)

    async def act(self, seed: int) -> Act:
        assert self.conversation is not None
        prompt = self.conversation.prompt_ids
        room = self.max_context - len(prompt)
        if room < 1:
            return Act(None, "context")
        sampling = Sampling(
            temperature=self.temperature,
            max_tokens=min(self.max_tokens, room),
            stop_token_ids=tuple(self.renderer.stop_token_ids),
            seed=seed,
        )
        generation = await self.session.generate(prompt, sampling)
        message = self.conversation.add_turn(generation, sampling)
        cut_by_context = generation.finish_reason == "length" and room < self.max_tokens
        return Act(message, "context" if cut_by_context else generation.finish_reason)

    def observe(self, messages: Sequence[Message]) -> None:
        assert self.conversation is not None
        _refuse_images(messages)
        self.conversation.add_messages(messages)

    def record(self, trajectory_id: str, group_id: str) -> Record:
        if self.conversation is None:
            return Record(())
        c = self.conversation
        return Record(c.messages, c.turns, c.samples(trajectory_id, group_id))

    def cut(self, text: str, max_tokens: int) -> tuple[str, int]:
        """Return the first `max_tokens` tokens of `text`, and how many it has in all."""
        ids = self.renderer.control.encode(self.renderer.control.shield(text))
        if len(ids) <= max_tokens:
            return text, len(ids)
        return self.renderer.decode(ids[:max_tokens]), len(ids)

    def close(self) -> None:
        self.session.close()


def _refuse_images(messages: Sequence[Message]) -> None:
    """Raise TemplateError: engines take token ids alone, so the policy would see the placeholders."""
    image = next(iter(images_of(messages)), None)
    if image is not None:
        raise TemplateError(
            f"the environment shows an image ({image.url[:80]}), and policies do not see images yet; "
            "describe it as text"
        )


def policy_agents(
    engine: Engine, renderer: Renderer, *, temperature: float, max_tokens: int, max_context: int
) -> Agents:
    """Return agents that sample from `engine`, one session each."""

    def make(key: str) -> Agent:
        return PolicyAgent(
            engine.session(key),
            renderer,
            temperature=temperature,
            max_tokens=max_tokens,
            max_context=max_context,
        )

    return make
