"""Tiny models, samples and recipes for the tests of the training spine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from stepladder.data.chat.tiny_tokenizer import tiny_tokenizer
from stepladder.policies.policy import Mode, Policy
from stepladder.policies.tiny import Architecture, tiny_model
from stepladder.recipe.config import Recipe, load_recipe
from stepladder.types import TrainingSample

DIGIT_SYMBOLS = ("?", "S", "0", "1", "2", "3", "4")
SIZES: dict[str, Any] = {"hidden": 32, "layers": 2, "intermediate": 48, "max_positions": 128}
TIMES = ("seconds", "tokens_per_second", "updated_at")


def tiny_policy(
    arch: Architecture = "llama",
    *,
    symbols: Sequence[str] = (),
    seed: int = 0,
    mode: Mode | None = None,
    dtype: torch.dtype = torch.float32,
    scale: float = 0.3,
) -> Policy:
    """A random model whose predictions are far from uniform (every weight moved by `scale` * normal)."""
    tokenizer = tiny_tokenizer(*symbols)
    model = tiny_model(len(tokenizer), arch=arch, seed=seed, **SIZES)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    return Policy(model.to(dtype), tokenizer, mode=mode)


def sample(
    ids: Sequence[int],
    prompt: int,
    *,
    trajectory: str = "t",
    group: str = "g",
    behaviour: Sequence[float] | None = None,
    mask: Sequence[bool] | None = None,
) -> TrainingSample:
    """A sample whose first `prompt` tokens are a prompt and whose others were sampled (or as `mask` says)."""
    chosen = tuple(mask) if mask is not None else tuple(i >= prompt for i in range(len(ids)))
    return TrainingSample(
        tuple(ids),
        chosen,
        tuple(behaviour) if behaviour is not None else (0.0,) * len(ids),
        trajectory,
        tuple(0 if m else -1 for m in chosen),
        group,
    )


def random_samples(
    count: int, *, groups: int = 2, vocabulary: int = 100, seed: int = 0, shared: int = 10
) -> list[TrainingSample]:
    """Samples that share a head, then their group's prompt, then go apart at different lengths."""
    generator = torch.Generator().manual_seed(seed)

    def draw(n: int) -> list[int]:
        return torch.randint(8, vocabulary, (n,), generator=generator).tolist()

    head = draw(shared)
    prompts = [head + draw(3 + g) for g in range(groups)]
    out = []
    for i in range(count):
        prompt = prompts[i % groups]
        ids = prompt + draw(2 + 3 * i % 7)
        out.append(sample(ids, len(prompt), trajectory=f"t{i}", group=f"g{i % groups}"))
    return out


def alone(policy: Policy, one: TrainingSample, temperature: float = 1.0) -> torch.Tensor:
    """log p of the trained tokens of one sample by the model's own forward pass: no packing, no cache."""
    ids = torch.tensor(one.token_ids)
    logits = policy.lm(input_ids=ids[None], use_cache=False).logits[0, :-1].float() / temperature
    chosen = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    return chosen[torch.tensor(one.mask[1:])]


def gradients(policy: Policy) -> dict[str, torch.Tensor]:
    """The gradients of the trainable parameters, cloned; they are cleared."""
    out = {}
    for name, p in policy.trainable().items():
        out[name] = torch.zeros_like(p) if p.grad is None else p.grad.clone()
        p.grad = None
    return out


def digit_recipe(out: Path, name: str = "run", *overrides: str) -> Recipe:
    """hidden_digit on a tiny model, all rungs, in about two seconds."""
    data: dict[str, Any] = {
        "run": {"name": name, "out": str(out), "checkpoint_every": 2, "threads": 1},
        "model": {"name": "tiny", "dtype": "float32", "options": {"symbols": list(DIGIT_SYMBOLS), **SIZES}},
        "environment": {"name": "hidden_digit"},
        "rollout": {"max_turns": 2, "max_tokens": 3, "max_context": 32},
        "sft": {
            "demonstrations": 48,
            "epochs": 3,
            "batch_size": 8,
            "learning_rate": 1e-2,
            "validation": 16,
        },
        "rl": {
            "kl": {"coefficient": 0.0},
            "steps": 5,
            "tasks_per_step": 3,
            "group_size": 4,
            "learning_rate": 3e-3,
        },
        "evaluation": {"tasks": 12, "raw": 6},
    }
    return load_recipe(data, overrides)


def lines(path: Path) -> list[dict[str, Any]]:
    """The records of a .jsonl file without what tells the time."""
    return [_timeless(json.loads(line)) for line in path.read_text().splitlines()]


def outcome(run: Path) -> dict[str, Any]:
    """All that two runs of one recipe must have in common, bit for bit."""
    (file,) = (run / "final").glob("*model.safetensors")
    tensors = load_file(file)
    return {
        "weights": {name: tensor.float().numpy().tobytes() for name, tensor in tensors.items()},
        "metrics": lines(run / "metrics.jsonl"),
        "evaluations": lines(run / "evaluations.jsonl"),
        "trajectories": lines(run / "trajectories" / "rl.jsonl"),
    }


def assert_same(got: Path, wanted: Path) -> None:
    """Compare `outcome`s, naming the first part that differs."""
    one, other = outcome(got), outcome(wanted)
    for part in other:
        assert len(one[part]) == len(other[part]), part
        if isinstance(other[part], list):
            for k, (a, b) in enumerate(zip(one[part], other[part], strict=True)):
                assert a == b, f"{part}, line {k}"
        assert one[part] == other[part], part


def _timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _timeless(v) for k, v in value.items() if not k.startswith(TIMES)}
    if isinstance(value, list):
        return [_timeless(v) for v in value]
    return value
