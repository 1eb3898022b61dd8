"""A second model that scores what the policy says: loaded frozen, and refused where it reads other tokens."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from stepladder.errors import ConfigError
from stepladder.policies.policy import Policy
from stepladder.policies.pretrained import load_model, load_tokenizer
from stepladder.recipe.distillation import DistillationSection
from stepladder.run.folder import model_folder


def load_teacher(section: DistillationSection, student: Policy) -> Policy:
    """The teacher on the student's device, without gradients. Raises ConfigError for another vocabulary."""
    folder = model_folder(section.teacher)
    model, tokenizer = load_model(folder, dtype=section.teacher_dtype, device=str(student.device))
    check_vocabulary(student.tokenizer, tokenizer, section.teacher)
    model.requires_grad_(False)
    teacher = Policy(model, tokenizer)
    for policy, who in ((student, "the policy"), (teacher, "the teacher")):
        if policy.mode == "full" and section.loss == "divergence":
            raise ConfigError(
                f"the logits of {who} are not its head times its hidden states (soft caps, scaling), which "
                "the divergence over the vocabulary needs; set distillation.loss = 'sampled'"
            )
    return teacher


def check_teacher(section: DistillationSection, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ConfigError or ModelNotFound before anything is trained; reads the teacher's tokenizer only."""
    check_vocabulary(tokenizer, load_tokenizer(model_folder(section.teacher)), section.teacher)


def check_vocabulary(student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase, name: str) -> None:
    """Every token must have the same id in both. Raises ConfigError with the first that has not."""
    ours, theirs = student.get_vocab(), teacher.get_vocab()
    if ours == theirs:
        return
    token = min((ours.keys() ^ theirs.keys()) or {t for t in ours if ours[t] != theirs[t]})
    raise ConfigError(
        f"the teacher {name} reads other tokens than the policy: {token!r} is {_told(ours, token)} for the "
        f"policy and {_told(theirs, token)} for the teacher (sizes {len(ours)} and {len(theirs)}). "
        "Distillation compares probabilities token by token; take a teacher of the same family, or its "
        f"samples: `stepladder sample {name} --env ... --out data`, then sft.data = 'data/accepted.jsonl'"
    )


Head = tuple[Tensor, Tensor | None]


def heads(student: Policy, teacher: Policy) -> tuple[Head, Head]:
    """Both output layers over the common vocabulary, ([V, d], [V] or None) each, without rows of padding."""
    ours, theirs = (p.lm.get_output_embeddings() for p in (student, teacher))
    size = min(len(ours.weight), len(theirs.weight))
    return _rows(ours, size), _rows(theirs, size)


def _rows(layer: Any, size: int) -> Head:
    bias = getattr(layer, "bias", None)
    return layer.weight[:size], None if bias is None else bias[:size]


def _told(vocabulary: dict[str, int], token: str) -> str:
    return f"token {vocabulary[token]}" if token in vocabulary else "no token"
