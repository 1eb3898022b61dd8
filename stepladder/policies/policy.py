"""The model being trained, as something that scores tokens.

`Policy.logprobs` gives the log-probability of every sampled token of a batch of samples, whatever the
layout underneath: one packed row with shared prefixes where a probe has shown that it is exact for this
model, plain right-padding otherwise.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from stepladder.data.batching import PackedBatch, pack
from stepladder.errors import ConfigError
from stepladder.objectives.logprobs import chunked_logprobs
from stepladder.policies.dropout import zero_dropout
from stepladder.policies.fast.attention import NAME, Layout
from stepladder.policies.fast.lean import lean_layers, recompute_layers
from stepladder.policies.optimizer import trainable
from stepladder.types import TrainingSample

log = logging.getLogger("stepladder")

Mode = Literal["packed", "padded", "full"]
FILL = 16  # tokens: a packed row on a CPU is filled up to a multiple of it


@dataclass(frozen=True, slots=True)
class Scores:
    """`logprobs[b, t]` = log p(token t of sample b | before it) at the temperature, 0 where not `mask`.

    `entropy[b, t]` is the entropy (nats) of the distribution that token was drawn from; without gradient
    unless it was asked for.
    All three are [B, T]; `tokens_computed` counts the tokens that went through the body.
    """

    logprobs: Tensor
    entropy: Tensor
    mask: Tensor
    tokens_computed: int


class Policy:
    """A causal language model with its tokenizer.

    `mode` is chosen by a probe: "packed" (one row, shared prefixes), "padded", or "full" for models
    whose logits are not simply head(hidden) (soft caps, scaling).
    """

    def __init__(self, model: nn.Module, tokenizer: PreTrainedTokenizerBase, *, mode: Mode | None = None):
        whole: Any = model
        self.model = whole
        self.tokenizer = tokenizer
        self.lm: Any = whole.get_base_model() if hasattr(model, "peft_config") else whole
        self.lm.eval()
        zero_dropout(self.lm)  # ratio 1 needs one function for behaviour and current log-probabilities
        self._own_attention = not self._take_attention()
        lean_layers(self.lm)
        self.mode: Mode = mode or self._probe()

    @property
    def device(self) -> torch.device:
        where: torch.device = next(self.model.parameters()).device
        return where

    @property
    def dtype(self) -> torch.dtype:
        kind: torch.dtype = next(self.model.parameters()).dtype
        return kind

    def trainable(self) -> dict[str, nn.Parameter]:
        """Parameters that training updates, by name, each shared (tied) tensor once."""
        return trainable(self.model)

    def freeze_embeddings(self) -> None:
        """Leave the input and output embeddings as they are (a third of a small model's work)."""
        for module in (self.lm.get_input_embeddings(), self.lm.get_output_embeddings()):
            if module is not None:
                module.requires_grad_(False)

    def recompute_layers(self) -> bool:
        """Activation checkpointing from now on; False where nothing changed. See policies/fast/lean.py."""
        return recompute_layers(self.lm)

    def logprobs(
        self, samples: Sequence[TrainingSample], *, temperature: float = 1.0, entropy_gradient: bool = False
    ) -> Scores:
        """Score the tokens whose mask is True. Gradients flow where autograd is on."""
        if temperature <= 0:
            raise ConfigError(f"temperature must be above 0 to score tokens; got {temperature}. Try 1.0")
        _refuse_images(samples)
        scored = self._packed if self.mode == "packed" else self._padded
        return scored(samples, temperature, entropy_gradient)

    @property
    def hidden_size(self) -> int:
        """d, the length of a hidden state."""
        size: int = self.lm.config.get_text_config().hidden_size
        return size

    def hidden_at(
        self, samples: Sequence[TrainingSample], positions: Sequence[Sequence[int]]
    ) -> tuple[Tensor, int]:
        """([n, d], tokens computed): the body's last hidden state at `positions[b]` of each sample, in order.

        In the layout of `mode`, as `logprobs`; gradients flow where autograd is on. The state at position t
        has seen the tokens up to and including t. Raises IndexError for a position outside its sample.
        """
        _refuse_images(samples)
        for b, (sample, at) in enumerate(zip(samples, positions, strict=True)):
            outside = [t for t in at if not 0 <= t < len(sample.token_ids)]
            if outside:
                raise IndexError(
                    f"position {outside[0]} is outside sample {b}, whose positions are 0 to "
                    f"{len(sample.token_ids) - 1}"
                )
        if self.mode == "packed":
            packed = pack(samples)
            rows = [int(packed.rows[b][t]) for b, at in enumerate(positions) for t in at]
            where = torch.tensor(rows, dtype=torch.long, device=self.device)
            return self._packed_hidden(packed)[where], packed.num_tokens
        ids, real, _ = self._pad(samples)
        inputs = {"input_ids": ids, "attention_mask": real, "use_cache": False}
        if self.mode == "full":
            hidden = self.lm(**inputs, output_hidden_states=True).hidden_states[-1]
        else:
            hidden = self._body()(**inputs).last_hidden_state
        places = [(b, t) for b, at in enumerate(positions) for t in at]
        index = torch.tensor(places, dtype=torch.long, device=self.device).reshape(-1, 2)
        return hidden[index[:, 0], index[:, 1]], int(real.sum())

    # -- layouts ------------------------------------------------------------------------------------

    def _packed_hidden(self, packed: PackedBatch) -> Tensor:
        """[N or a little more, d]: on a CPU the row is filled up, for each length that a matrix product has
        not seen yet costs a compilation of milliseconds and half a megabyte for as long as the process lives.
        """
        device, n = self.device, packed.num_tokens
        filled = n + (-n % FILL if device.type == "cpu" else 0)
        ids = torch.zeros(1, filled, dtype=torch.long)
        positions = torch.zeros(1, filled, dtype=torch.long)
        ids[0, :n] = torch.from_numpy(packed.token_ids)
        positions[0, :n] = torch.from_numpy(packed.position_ids)
        hidden: Tensor = self._body()(
            input_ids=ids.to(device),
            position_ids=positions.to(device),
            attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device),  # ours is in the layout
            use_cache=False,
            layout=Layout.of(packed, device, filled),
        ).last_hidden_state[0]
        return hidden

    def _packed(
        self, samples: Sequence[TrainingSample], temperature: float, entropy_gradient: bool
    ) -> Scores:
        packed = pack(samples, scored_only=True)
        device = self.device
        hidden = self._packed_hidden(packed)
        scores, entropy = self._head(
            hidden[torch.from_numpy(packed.sources).to(device)],
            torch.from_numpy(packed.targets).to(device),
            temperature,
            entropy_gradient,
        )
        shape = (len(samples), max(len(s.token_ids) for s in samples))
        rows, columns, units = _scatter_index(packed.places)
        mask = torch.zeros(shape, dtype=torch.bool, device=device)
        mask[rows, columns] = True
        where = (rows.to(device), columns.to(device))
        return Scores(
            torch.zeros(shape, device=device).index_put(where, scores[units.to(device)]),
            torch.zeros(shape, device=device).index_put(where, entropy[units.to(device)]),
            mask,
            packed.num_tokens,
        )

    def _padded(
        self, samples: Sequence[TrainingSample], temperature: float, entropy_gradient: bool
    ) -> Scores:
        ids, real, mask = self._pad(samples)
        rows, columns = mask.nonzero(as_tuple=True)
        inputs = {"input_ids": ids, "attention_mask": real, "use_cache": False}
        if self.mode == "full":
            logits = self.lm(**inputs).logits[rows, columns - 1].float() / temperature
            table = logits.log_softmax(-1)
            scores = table.gather(1, ids[rows, columns][:, None])[:, 0]
            entropy = -(table.exp() * table).sum(-1)
            entropy = entropy if entropy_gradient else entropy.detach()
        else:
            hidden = self._body()(**inputs).last_hidden_state
            scores, entropy = self._head(
                hidden[rows, columns - 1], ids[rows, columns], temperature, entropy_gradient
            )
        zeros = torch.zeros(mask.shape, device=self.device)
        return Scores(
            zeros.index_put((rows, columns), scores),
            zeros.index_put((rows, columns), entropy),
            mask,
            int(real.sum()),
        )

    def _pad(self, samples: Sequence[TrainingSample]) -> tuple[Tensor, Tensor, Tensor]:
        """(ids, 1 on real tokens, mask), each [B, T], padded on the right."""
        width = max(len(s.token_ids) for s in samples)
        ids = torch.zeros(len(samples), width, dtype=torch.long)
        real = torch.zeros(len(samples), width, dtype=torch.long)
        mask = torch.zeros(len(samples), width, dtype=torch.bool)
        for b, sample in enumerate(samples):
            n = len(sample.token_ids)
            ids[b, :n] = torch.tensor(sample.token_ids)
            real[b, :n] = 1
            mask[b, :n] = torch.tensor(sample.mask)
        return ids.to(self.device), real.to(self.device), mask.to(self.device)

    def _body(self) -> nn.Module:
        body: nn.Module = getattr(self.lm, self.lm.base_model_prefix)
        return body

    def _head(
        self, hidden: Tensor, targets: Tensor, temperature: float, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        head = self.lm.get_output_embeddings()
        return chunked_logprobs(
            hidden,
            head.weight,
            targets,
            temperature=temperature,
            chunk=256 if hidden.device.type == "cpu" else 512,
            bias=getattr(head, "bias", None),
            differentiable_entropy=entropy_gradient,
        )

    # -- which layout is exact for this model ---------------------------------------------------------

    def _take_attention(self) -> bool:
        """Give the model our attention, unless it computes what SDPA cannot (sinks, caps on scores).

        Ours is SDPA where no layout is given, so a model that came with SDPA needs no proof.
        """
        own = self.lm.config._attn_implementation
        if own in (NAME, "sdpa"):
            self.lm.set_attn_implementation(NAME)
            return True
        samples = _probe_samples(self.lm.config.get_text_config().vocab_size)
        wanted = self._reference(samples)
        self.lm.set_attn_implementation(NAME)
        try:
            error = float((self._reference(samples) - wanted).abs().sum()) / sum(
                s.num_trained for s in samples
            )
        except (TypeError, ValueError, RuntimeError):
            error = float("inf")
        if error <= self._tolerance:
            return True
        self.lm.set_attn_implementation(own)
        return False

    @property
    def _tolerance(self) -> float:
        """bf16 rounds each layer's output in whatever order it was computed; an error of layout is nats."""
        return 1e-4 if self.dtype == torch.float32 else 0.15

    def _probe(self) -> Mode:
        """The first layout whose log-probabilities equal the model's own on a small batch."""
        samples = _probe_samples(self.lm.config.get_text_config().vocab_size)
        wanted = self._reference(samples)
        scored = sum(s.num_trained for s in samples)
        candidates: list[Mode] = ["packed", "padded"]
        if self._own_attention:
            log.warning(
                "packing and shared prefixes are off for this model (%s): its attention (%s) computes what "
                "SDPA does not",
                self.lm.config.model_type,
                self.lm.config._attn_implementation,
            )
            candidates = ["padded"]
        elif not _full_attention(self.lm.config):
            log.warning(
                "packing and shared prefixes are off for this model (%s): some of its layers do not attend "
                "to the whole sequence",
                self.lm.config.model_type,
            )
            candidates = ["padded"]
        if hasattr(self.lm.get_output_embeddings(), "base_layer"):
            log.warning(
                "the output layer has an adapter of its own, so it makes its logits itself: packing and "
                "chunked log-probabilities are off, and an update takes more memory"
            )
            return "full"  # a new adapter is 0, which no probe of values can see
        for mode in candidates:
            self.mode = mode
            try:
                with torch.no_grad():
                    got = self.logprobs(samples).logprobs
            except (TypeError, AttributeError, RuntimeError) as problem:
                log.warning("the %s layout does not run on this model (%s)", mode, problem)
                continue
            error = float((got - wanted).abs().sum()) / scored
            if error <= self._tolerance:
                return mode
            log.warning("the %s layout is off by %.2g nats a token on this model; not used", mode, error)
        return "full"

    @torch.no_grad()
    def _reference(self, samples: Sequence[TrainingSample]) -> Tensor:
        out = torch.zeros(len(samples), max(len(s.token_ids) for s in samples), device=self.device)
        for b, sample in enumerate(samples):
            ids = torch.tensor(sample.token_ids, device=self.device)
            table = self.lm(input_ids=ids[None], use_cache=False).logits[0, :-1].float().log_softmax(-1)
            scores = table.gather(1, ids[1:, None])[:, 0]
            out[b, 1 : len(ids)] = scores * torch.tensor(sample.mask[1:], device=self.device)
        return out


def _scatter_index(places: Sequence[tuple[Any, Any]]) -> tuple[Tensor, Tensor, Tensor]:
    rows = torch.cat([torch.full((len(at),), b, dtype=torch.long) for b, (at, _) in enumerate(places)])
    columns = torch.cat([torch.from_numpy(at) for at, _ in places])
    units = torch.cat([torch.from_numpy(unit) for _, unit in places])
    return rows, columns, units


def _refuse_images(samples: Sequence[TrainingSample]) -> None:
    sample = next((s for s in samples if s.images), None)
    if sample is not None:
        raise ConfigError(
            f"sample {sample.trajectory_id!r} holds {len(sample.images)} image(s), which nothing expands to "
            "pixels yet: it would be trained on placeholders; leave such rows out, or describe the images as "
            "text"
        )


def _probe_samples(vocab_size: int) -> list[TrainingSample]:
    """Two groups of two, sharing a long prefix, forking at different places."""
    generator = torch.Generator().manual_seed(0)

    def draw(n: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, vocab_size, (n,), generator=generator).tolist())

    shared, samples = draw(12), []
    for g in range(2):
        prompt = shared + draw(4 + g)
        for i in range(2):
            ids = prompt + draw(3 + i)
            mask = tuple(j >= len(prompt) for j in range(len(ids)))
            turns = tuple(0 if m else -1 for m in mask)
            samples.append(TrainingSample(ids, mask, (0.0,) * len(ids), f"{g}/{i}", turns, str(g)))
    return samples


def _full_attention(config: Any) -> bool:
    """False where some layer looks through a window, chunks, or keeps a recurrent state."""
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None)
    if kinds is not None:
        return all(kind == "full_attention" for kind in kinds)
    return getattr(text, "sliding_window", None) is None
