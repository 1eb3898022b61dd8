"""Reference log-probabilities: computed once, before the first update, and logged.

They lie in the run folder (what a resumed run needs, bit for bit) and in the user's cache, so that the next
run on the same data and model does not compute them again. The key is a hash of what they are a function of:
token ids and masks (so: data, tokenizer, template, length budgets) and every weight.
No second model is held in memory, and nothing is ever computed from a policy that has trained.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from stepladder.data.batching import FORWARD_ONLY, micro_batches
from stepladder.errors import CheckpointError
from stepladder.policies.bundled import cache_root
from stepladder.policies.policy import Policy
from stepladder.policies.tensors import load_tensors, room_for, save_tensors
from stepladder.types import TrainingSample

FILE = "reference_logprobs.safetensors"
FORMAT = 1  # raise when the meaning of a cached file changes


class ReferenceLog:
    """The log-probabilities of one policy, as it was, on the samples of a rung.

    `base=True`: of the model without its adapter. `weights` is the fingerprint of the policy that a run was
    started with, known when it is resumed; None takes that of the present weights, which have not trained.
    `cache=False` leaves the user's cache alone.
    """

    def __init__(
        self,
        policy: Policy,
        folder: Path,
        *,
        base: bool = False,
        token_budget: int = 4096,
        weights: str | None = None,
        cache: bool = True,
    ) -> None:
        self.policy, self.base, self.token_budget, self.cache = policy, base, token_budget, cache
        self.path = folder / FILE
        self.trained = weights is not None
        self.weights = weights if weights is not None else weights_fingerprint(policy, base=base)

    def of(self, samples: Sequence[TrainingSample]) -> list[Tensor]:
        """log p (nats, float32) of the trained tokens of each sample: from the run folder, the cache, or now.

        Raises CheckpointError where the policy has trained since, and neither place has them.
        """
        key = self.key(samples)
        cached = self.cache_path(key)
        for path in (self.path, cached) if self.cache else (self.path,):
            found = _read(path, key, samples)
            if found is not None:
                break
        else:
            if self.trained:
                raise CheckpointError(
                    f"{self.path} holds no reference log-probabilities of these answers, and the policy has "
                    "trained since: the file is gone, or the data, the template or a length limit changed. "
                    "Put them back, or start the run anew"
                )
            found = self._compute(samples)
            if self.cache:
                _write(cached, key, found)
        if path != self.path:
            _write(self.path, key, found)
        return found

    def key(self, samples: Sequence[TrainingSample]) -> str:
        """A hash of what the values are a function of: tokens, masks, weights."""
        digest = hashlib.blake2b(json.dumps([FORMAT, self.weights, self.base]).encode(), digest_size=20)
        for sample in samples:
            digest.update(json.dumps([sample.token_ids, sample.mask]).encode())
        return digest.hexdigest()

    def cache_path(self, key: str) -> Path:
        """Where the user's cache has them; another way to compute them, which rounds otherwise, is another
        file, so that a cache never makes two equal runs differ."""
        policy = self.policy
        how = [policy.mode, str(policy.dtype), policy.device.type, self.token_budget]
        where = [torch.get_num_threads(), torch.__version__]
        name = hashlib.blake2b(json.dumps([key, *how, *where]).encode(), digest_size=20).hexdigest()
        return cache_root() / "reference" / f"{name}.safetensors"

    @torch.no_grad()
    def _compute(self, samples: Sequence[TrainingSample]) -> list[Tensor]:
        out: list[Tensor] = [torch.empty(0)] * len(samples)
        with _without_adapter(self.policy) if self.base else contextlib.nullcontext():
            for rows in micro_batches(samples, FORWARD_ONLY * self.token_budget):
                scores = self.policy.logprobs([samples[i] for i in rows])
                for b, i in enumerate(rows):
                    out[i] = scores.logprobs[b][scores.mask[b]].cpu()
        return out


def weights_fingerprint(policy: Policy, *, base: bool = False) -> str:
    """A hash of every parameter and buffer by name, type and bytes; with `base`, of all but the adapter."""
    digest = hashlib.blake2b(digest_size=20)
    for name, tensor in policy.model.state_dict().items():
        if base and "lora_" in name:
            continue
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


@contextlib.contextmanager
def _without_adapter(policy: Policy) -> Iterator[None]:
    with policy.model.disable_adapter():
        yield


def _read(path: Path, key: str, samples: Sequence[TrainingSample]) -> list[Tensor] | None:
    """What `_write` wrote for this key; None where the file is not there, of another key or damaged."""
    if not path.is_file():
        return None
    try:
        saved = load_tensors(path)
    except CheckpointError:
        return None
    stamp = saved.get("key")
    lengths = [sample.num_trained for sample in samples]
    if stamp is None or bytes(stamp.tolist()).decode() != key or saved["logprobs"].numel() != sum(lengths):
        return None
    return list(torch.split(saved["logprobs"], lengths))


def _write(path: Path, key: str, values: Sequence[Tensor]) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.new")
    with room_for("the reference log-probabilities", path.parent):
        stamp = torch.tensor(list(key.encode()), dtype=torch.uint8)
        save_tensors(aside, {"logprobs": torch.cat(list(values)), "key": stamp})
    os.replace(aside, path)
