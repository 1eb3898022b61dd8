"""The renderer: one model's tokenizer, chat template and tool format, ready to hold conversations.

renderer = Renderer(tokenizer)
conversation = renderer.start(messages, tools)
generation = engine(conversation.prompt_ids, stop=renderer.stop_token_ids)
message = conversation.add_turn(generation, sampling)
conversation.add_messages(environment.step(message).messages)
...
samples = conversation.samples("trajectory-0", "group-0")
"""

from __future__ import annotations

from collections.abc import Sequence

from stepladder.data.chat.conversation import Conversation
from stepladder.data.chat.demonstration import demonstrate, own_text
from stepladder.data.chat.plain_text import raw_sample
from stepladder.data.chat.template import ChatTemplate
from stepladder.data.encoder import Side, Train
from stepladder.errors import DataError
from stepladder.types import Message, Tool, TrainingSample


class Renderer(ChatTemplate):
    """A chat template with which conversations are held; what it is made from, `ChatTemplate` says."""

    def start(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> Conversation:
        """A conversation that begins with `messages`, ready to sample the assistant's turn.

        Raises `TemplateError` when the template cannot render them, or has no way to show the tools.
        """
        self.require_tools(tools)
        return Conversation(self, messages, tools)

    def demonstration(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        trajectory_id: str,
        group_id: str = "",
        train: Train = "assistant",
        answers_from: int = 0,
    ) -> tuple[TrainingSample, ...]:
        """Samples for supervised fine-tuning; see `stepladder.data.chat.demonstration.demonstrate`."""
        return demonstrate(self, messages, tools, trajectory_id, group_id, train, answers_from)

    def completed(
        self, prompt: Side, completion: Side, tools: Sequence[Tool], *, trajectory_id: str, group_id: str
    ) -> TrainingSample | None:
        """Return one sample, see `data.encoder.Encoder`; strings go past the template."""
        if isinstance(prompt, str) and isinstance(completion, str):
            return raw_sample(self.tokenizer, self.control, prompt, completion, trajectory_id, group_id)
        if isinstance(prompt, str) or isinstance(completion, str):
            raise DataError(
                "prompt and completion must both be strings or both be messages; got "
                f"{type(prompt).__name__} and {type(completion).__name__}"
            )
        samples = self.demonstration(
            (*prompt, *completion),
            tools,
            trajectory_id=trajectory_id,
            group_id=group_id,
            answers_from=len(prompt),
        )
        return samples[0] if len(samples) == 1 else None

    def answered(self, prompt: Sequence[Message], answer: str) -> tuple[tuple[int, ...], str, str]:
        """Return (ids of the prompt, shielded text of the answer, its terminator)."""
        conversation = self.start(prompt)
        return conversation.prompt_ids, *own_text(self, conversation, Message("assistant", answer))
