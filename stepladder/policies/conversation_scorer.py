"""A reward model that scores conversations: rendered by its own template, in batches."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import torch

from stepladder.data.batching import micro_batches
from stepladder.data.budget import Dropped
from stepladder.data.chat.renderer import Renderer
from stepladder.data.files.records import Steps
from stepladder.data.positions import max_positions
from stepladder.data.samples import StepSample, completion_samples, step_samples
from stepladder.errors import ConfigError, DataError
from stepladder.policies.heads import ScoredModel
from stepladder.policies.pretrained import DType
from stepladder.policies.reward_folder import RewardInfo
from stepladder.policies.scored import load_scored
from stepladder.recipe.config import scoring_kinds
from stepladder.types import Message, TrainingSample


class ConversationScorer:
    """`scores` for an outcome reward model, `step_logprobs` for a process reward model.

    What cannot be scored (no answer in it, too long for the model, a template that cannot render it) is
    None, never 0. Safe to call from several threads; they take turns.
    """

    def __init__(self, model: ScoredModel, info: RewardInfo, *, token_budget: int = 8192) -> None:
        self.model, self.info, self.token_budget = model, info, token_budget
        self.renderer = Renderer(model.tokenizer, extra_stop_ids=info.stop_token_ids)
        self.limit = max_positions(model.policy.lm)
        self._turn = threading.Lock()

    @classmethod
    def load(cls, name: str | Path, *, dtype: DType = "auto", device: str = "auto") -> ConversationScorer:
        """From a folder or name; see `load_scored` for what it raises."""
        return cls(*load_scored(name, dtype=dtype, device=device))

    @property
    def kind(self) -> str:
        return self.info.kind

    @property
    def mean(self) -> float:
        return self.info.mean

    @property
    def std(self) -> float:
        return self.info.std

    def scores(self, conversations: Sequence[Sequence[Message]]) -> list[float | None]:
        """The raw score of each conversation, up to its last assistant message, which ends the row."""
        self._require("outcome")
        found = {i: s for i, c in enumerate(conversations) if (s := self._sample(c, i)) is not None}
        out: list[float | None] = [None] * len(conversations)
        order, samples = list(found), list(found.values())
        with self._turn, torch.no_grad():
            for rows in micro_batches(samples, self.token_budget) if samples else []:
                for row, score in zip(rows, self.model.sequence_scores([samples[r] for r in rows]).tolist()):
                    out[order[row]] = score
        return out

    def step_logprobs(self, conversations: Sequence[Sequence[Message]]) -> list[tuple[float, ...] | None]:
        """log P(right) of each step of each conversation's last assistant message."""
        self._require("process")
        found = {i: s for i, c in enumerate(conversations) if (s := self._steps(c, i)) is not None}
        out: list[tuple[float, ...] | None] = [None] * len(conversations)
        order, rows = list(found), list(found.values())
        samples = [row.sample for row in rows]
        with self._turn, torch.no_grad():
            for chosen in micro_batches(samples, self.token_budget) if rows else []:
                ends = [rows[r].ends for r in chosen]
                logits, _ = self.model.at([samples[r] for r in chosen], ends)
                values = torch.nn.functional.logsigmoid(logits).tolist()
                for r, at in zip(chosen, ends):
                    out[order[r]] = tuple(values[: len(at)])
                    values = values[len(at) :]
        return out

    def _require(self, kind: str) -> None:
        if self.info.kind != kind:
            section = {kind: name for name, kind in scoring_kinds().items()}
            raise ConfigError(
                f"this is a model of kind {self.info.kind!r} and a {kind!r} one is needed; give the folder "
                f"{section[kind]}/ of a run, or name it as {section[self.info.kind]}:PATH"
            )

    def _sample(self, messages: Sequence[Message], i: int) -> TrainingSample | None:
        last = last_answer(messages)
        if last is None:
            return None
        key = f"c{i}"
        try:
            sample = completion_samples(
                self.renderer, messages[:last], messages[last : last + 1], trajectory_id=key, group_id=key
            )
        except DataError:  # of a template too; the caller sees None
            return None
        return None if isinstance(sample, Dropped) or self._too_long(sample) else sample

    def _steps(self, messages: Sequence[Message], i: int) -> StepSample | None:
        last = last_answer(messages)
        if last is None:
            return None
        separator = self.info.separator
        steps = tuple(s for s in messages[last].text.split(separator) if s.strip())
        if not steps:
            return None
        record = Steps(tuple(messages[:last]), steps)
        try:
            found = step_samples(self.renderer, record, group_id=f"c{i}", separator=separator)
        except DataError:
            return None
        return None if isinstance(found, Dropped) or self._too_long(found.sample) else found

    def _too_long(self, sample: TrainingSample) -> bool:
        return self.limit is not None and len(sample.token_ids) > self.limit


def last_answer(messages: Sequence[Message]) -> int | None:
    """The place of the last assistant message, where something precedes it."""
    said = [i for i, message in enumerate(messages) if message.role == "assistant"]
    return said[-1] if said and said[-1] > 0 else None
