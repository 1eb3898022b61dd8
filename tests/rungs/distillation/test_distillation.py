"""Distillation: numbers by hand, the teacher found where it can be, and no interruption shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from interruptions import Crash, at_call, crash
from safetensors.torch import load_file
from spine import digit_recipe, gradients, lines, random_samples, tiny_policy
from test_docs import documented

from stepladder import ladder
from stepladder.errors import ConfigError
from stepladder.objectives.distillation import chunked_js, generalised_js
from stepladder.objectives.kl import exact_kl
from stepladder.policies.optimizer import MasterOptimizer, trainable
from stepladder.policies.policy import Policy
from stepladder.recipe.config import Recipe
from stepladder.run.progress import Display
from stepladder.rungs.distillation import rung as distillation
from stepladder.rungs.distillation.teacher import check_vocabulary
from stepladder.rungs.distillation.update import distillation_update
from stepladder.workbench.bench import Workbench

GOLDEN = {0.0: 0.219722, 0.1: 0.019712, 0.5: 0.055231, 0.9: 0.020865, 1.0: 0.236712}


@pytest.mark.parametrize("beta", GOLDEN)
def test_the_chunks_give_the_golden_numbers(beta: float) -> None:
    """Teacher (.6, .3, .1), student (.3, .4, .3): with an identity head the hidden states are the logits."""
    teacher = torch.tensor([[0.6, 0.3, 0.1]]).log().repeat(5, 1)
    student = torch.tensor([[0.3, 0.4, 0.3]]).log().repeat(5, 1)
    losses, kl = chunked_js(student, torch.eye(3), teacher, torch.eye(3), beta=beta, chunk=2)
    assert losses.tolist() == pytest.approx([GOLDEN[beta]] * 5, abs=1e-6)
    assert kl.tolist() == pytest.approx([GOLDEN[1.0]] * 5, abs=1e-6)


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_chunks_change_neither_losses_nor_gradients(chunk: int) -> None:
    g = torch.Generator().manual_seed(0)
    hidden, head, other, heads = (torch.randn(s, generator=g) for s in ((7, 4), (11, 4), (7, 5), (11, 5)))
    found = []
    for mine in (False, True):
        h, w = hidden.clone().requires_grad_(), head.clone().requires_grad_()
        if mine:
            losses, _ = chunked_js(h, w, other, heads, beta=0.3, temperature=0.7, chunk=chunk)
        else:
            p, q = ((a @ b.T / 0.7).log_softmax(-1) for a, b in ((other, heads), (h, w)))
            losses = generalised_js(q, p, beta=0.3)
        (losses * torch.arange(7)).sum().backward()
        found.append((losses.detach(), h.grad, w.grad))
    for a, b in zip(*found, strict=True):
        assert torch.allclose(a, b, atol=1e-6)  # type: ignore[arg-type]


def test_heads_in_half_precision_have_logits_in_float32() -> None:
    """Logits up to some 25, rounded to bfloat16, would be off by .06: most of a divergence of .001 nats."""
    g = torch.Generator().manual_seed(1)
    hidden, head = (torch.randn(s, generator=g) for s in ((16, 32), (512, 32)))
    other = hidden + 0.01 * torch.randn(16, 32, generator=g)
    h, w, o = (t.bfloat16() for t in (hidden, head, other))
    exact = exact_kl(*((t.double() @ w.double().T).log_softmax(-1) for t in (h, o)))
    _, kl = chunked_js(h, w, o, w, beta=1.0, chunk=5)
    torch.testing.assert_close(kl.double(), exact, rtol=2e-3, atol=1e-7)


def test_the_bias_of_a_head_counts_and_learns() -> None:
    """Hidden states of 0: the biases are the logits. d KL(Q‖P)/dz_v = q_v·(ln q_v/p_v − KL)."""
    p, q = torch.tensor([0.6, 0.3, 0.1]), torch.tensor([0.3, 0.4, 0.3])
    bias = q.log().requires_grad_()
    none = torch.zeros(1, 2), torch.zeros(3, 2)
    losses, kl = chunked_js(*none, *none, student_bias=bias, teacher_bias=p.log(), beta=1.0)
    losses.sum().backward()
    distance = float((q * (q / p).log()).sum())
    assert losses.tolist() == kl.tolist() == pytest.approx([distance], abs=1e-6)
    torch.testing.assert_close(bias.grad, q * ((q / p).log() - distance), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("loss", ["divergence", "sampled"])
def test_a_step_in_which_nothing_was_said_moves_nothing(loss: Any) -> None:
    """Every episode had its context full before the first token."""
    policy, teacher = tiny_policy(), tiny_policy(seed=1)
    before = {name: p.clone() for name, p in policy.model.named_parameters()}
    metrics = distillation_update(
        policy,
        teacher,
        MasterOptimizer(trainable(policy.model)),
        [],
        loss=loss,
        beta=0.5,
        temperature=1.0,
        learning_rate=1e-3,
        token_budget=64,
    )
    assert (metrics["tokens"], metrics["grad_norm"]) == (0.0, 0.0)
    assert all(torch.equal(p, before[name]) for name, p in policy.model.named_parameters())


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_a_table_of_three_contexts_becomes_the_teachers(beta: float) -> None:
    """Three contexts, four tokens, free logits: every divergence is 0 only at the teacher."""
    teacher = torch.tensor([[0.6, 0.2, 0.1, 0.1], [0.05, 0.05, 0.45, 0.45], [0.25] * 4])
    table = torch.zeros(4, 3, requires_grad=True)  # a head over one-hot hidden states
    optimizer = torch.optim.Adam([table], lr=0.05)
    for _ in range(400):
        optimizer.zero_grad()
        losses, _ = chunked_js(torch.eye(3), table, teacher.log(), torch.eye(4), beta=beta, chunk=2)
        losses.mean().backward()
        optimizer.step()
    found = table.detach().t().softmax(-1)
    assert float((found - teacher).abs().sum(-1).max()) / 2 < 0.01


def step(policy: Policy, teacher: Policy, samples: Any, **changes: Any) -> dict[str, float]:
    optimizer = MasterOptimizer(trainable(policy.model), max_grad_norm=1e9)
    options: dict[str, Any] = {"loss": "divergence", "beta": 1.0, "temperature": 1.0, "token_budget": 10_000}
    out = distillation_update(
        policy, teacher, optimizer, samples, learning_rate=1e-9, **{**options, **changes}
    )
    optimizer.close()
    return out


@pytest.mark.parametrize("loss", ["divergence", "sampled"])
def test_how_a_batch_is_cut_changes_nothing(loss: Any) -> None:
    teacher, samples = tiny_policy(seed=1), random_samples(6)
    found = [step(tiny_policy(), teacher, samples, loss=loss, token_budget=b) for b in (10_000, 20)]
    for key in ("loss", "teacher_kl", "grad_norm", "tokens"):
        assert found[0][key] == pytest.approx(found[1][key], rel=1e-4), key


@pytest.mark.parametrize("mode", ["packed", "padded"])
def test_the_divergence_is_that_of_whole_logits(mode: Any) -> None:
    """Token by token from the models' own forward passes, one sample at a time."""
    student, teacher, samples = tiny_policy(mode=mode), tiny_policy(seed=1, mode=mode), random_samples(4)
    total, tokens = 0.0, 0
    for s in samples:
        ids = torch.tensor(s.token_ids)[None]
        tables = [
            p.lm(input_ids=ids, use_cache=False).logits[0, :-1].log_softmax(-1) for p in (student, teacher)
        ]
        own = torch.tensor(s.mask[1:])
        total += float(generalised_js(tables[0][own], tables[1][own], beta=0.5).detach().sum())
        tokens += int(own.sum())
    got = step(student, teacher, samples, beta=0.5)
    assert got["loss"] == pytest.approx(total / tokens, rel=1e-4)
    assert got["tokens"] == tokens


def test_a_student_equal_to_its_teacher_has_no_gradient() -> None:
    got = step(tiny_policy(), tiny_policy(), random_samples(4))
    assert got["loss"] == pytest.approx(0.0, abs=1e-6)
    assert got["grad_norm"] == pytest.approx(0.0, abs=1e-4)


def test_the_sampled_loss_is_the_reverse_kl_on_average() -> None:
    """One token after one prompt, drawn 3,000 times from the student: the mean of the sampled gradients is
    that of the exact reverse KL, in direction (cosine above .98) and length."""
    student, teacher = tiny_policy(scale=0.1), tiny_policy(seed=1, scale=0.1)
    base = random_samples(1)[0]
    prompt = base.token_ids[:12]
    with torch.no_grad():
        logits = student.lm(input_ids=torch.tensor(prompt)[None], use_cache=False).logits[0, -1]
    drawn = torch.multinomial(
        logits.softmax(-1), 3000, replacement=True, generator=torch.Generator().manual_seed(0)
    )
    made = [
        type(base)((*prompt, t), (False,) * 12 + (True,), (0.0,) * 13, f"{i}", (-1,) * 12 + (0,), "g")
        for i, t in enumerate(drawn.tolist())
    ]
    directions = []
    for loss in ("sampled", "divergence"):
        chosen = made if loss == "sampled" else made[:1]
        optimizer = _Kept()
        distillation_update(
            student, teacher, optimizer, chosen, loss=loss, beta=1.0, temperature=1.0,  # type: ignore[arg-type]
            learning_rate=0.0, token_budget=50_000,
        )  # fmt: skip
        directions.append(torch.cat([g.flatten() for g in gradients(student).values()]))
    assert float(torch.cosine_similarity(*directions, dim=0)) > 0.98
    assert float(directions[0].norm() / directions[1].norm()) == pytest.approx(1.0, abs=0.15)


class _Kept(MasterOptimizer):
    """An optimiser that leaves gradients where they are."""

    def __init__(self) -> None:
        pass

    def step(self, learning_rate: float) -> float:
        return 0.0


def test_other_tokens_are_refused_by_name() -> None:
    ours, theirs = tiny_policy().tokenizer, tiny_policy(symbols=("S",)).tokenizer
    with pytest.raises(ConfigError, match=r"reads other tokens than the policy: .*stepladder sample big"):
        check_vocabulary(ours, theirs, "big")
    check_vocabulary(ours, tiny_policy(seed=3).tokenizer, "big")


# -- a rung --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that searches and then answers, mostly."""
    out = tmp_path_factory.mktemp("teacher")
    more = ("rl=null", "evaluation.raw=0", "sft.epochs=8", "sft.demonstrations=96", "run.seed=5")
    return ladder.train(digit_recipe(out, "run", *more), display=Display(quiet=True))


def student(tmp_path: Path, name: str, teacher: Path, *overrides: str) -> Recipe:
    base = (
        "rl=null",
        "sft=null",
        "evaluation.raw=6",
        f"distillation.teacher={teacher}",
        "distillation.steps=6",
        "distillation.tasks_per_step=6",
        "distillation.learning_rate=1e-2",
    )
    return digit_recipe(tmp_path, name, *base, *overrides)


MIXED = ("distillation.on_policy=0.5", "distillation.demonstrations=24", "distillation.beta=0.5")


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param((), id="reverse"),
        pytest.param(MIXED, id="mixed"),
        pytest.param(("distillation.loss=sampled", "distillation.samples=4"), id="sampled"),
    ],
)
def test_the_distance_to_the_teacher_falls(tmp_path: Path, teacher: Path, variant: tuple[str, ...]) -> None:
    """From a model from scratch, in 40 steps, to less than a quarter of the distance, in its own samples."""
    recipe = student(tmp_path, "run", teacher, "distillation.steps=40", *variant)
    path = ladder.train(recipe, display=Display(quiet=True))
    distances = [m["teacher_kl"] for m in lines(path / "metrics.jsonl") if m["phase"] == "distillation"]
    assert len(distances) == 40
    assert sum(distances[-5:]) / 5 < 0.25 * distances[0]
    assert [e["rung"] for e in lines(path / "evaluations.jsonl")] == ["raw", "distillation"]
    names = {name for m in lines(path / "metrics.jsonl") for name in m if m["phase"] == "distillation"}
    plain = {"reward/NAME" if name.startswith("reward/") else name for name in names} - {"step", "phase"}
    assert plain <= documented('phase "distillation"') | {"seconds"}
    assert documented('phase "distillation"') <= plain | {"seconds", "reward/NAME"}


@pytest.mark.parametrize(
    ("owner", "name", "call", "after"),
    [
        (distillation, "distillation_update", 4, True),
        (Workbench, "play", 2, False),
        (distillation, "distillation_update", 3, False),
    ],
)
def test_a_resumed_run_is_the_quiet_one(
    tmp_path: Path,
    teacher: Path,
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    call: int,
    after: bool,
) -> None:
    """Both kinds of steps; a checkpoint after every second."""
    calm = ladder.train(student(tmp_path, "calm", teacher, *MIXED), display=Display(quiet=True))
    with monkeypatch.context() as patch:
        at_call(patch, owner, name, call, crash, after=after)
        with pytest.raises(Crash):
            ladder.train(student(tmp_path, "run", teacher, *MIXED), display=Display(quiet=True))
    path = ladder.resume(tmp_path / "run", display=Display(quiet=True))
    for file in ("metrics.jsonl", "evaluations.jsonl", "trajectories/distillation.jsonl"):
        assert lines(path / file) == lines(calm / file), file
    one, other = (load_file(next((p / "final").glob("*model.safetensors"))) for p in (path, calm))
    assert all(one[k].numpy().tobytes() == other[k].numpy().tobytes() for k in other)
    kinds = [m["on_policy"] for m in lines(calm / "metrics.jsonl") if m["phase"] == "distillation"]
    assert set(kinds) == {0.0, 1.0}
    said = json.loads((path / "data.json").read_text())["distillation"]["text"]
    assert said == "24 demonstrations of the environment; 24 rows: 24 kept"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("distillation.on_policy=0.5",), "give either data or demonstrations"),
        (("distillation.demonstrations=4",), "leave them out"),
        ((*MIXED, "distillation.loss=sampled"), "set on_policy = 1"),
        (("distillation.loss=sampled", "distillation.beta=0.5"), "means nothing"),
        (("environment=null",), r"\[distillation\]"),
    ],
)
def test_contradictions_are_refused(tmp_path: Path, overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        student(tmp_path, "run", Path("nowhere"), *overrides)


def test_another_vocabulary_is_refused_before_anything_is_written(tmp_path: Path, teacher: Path) -> None:
    recipe = student(tmp_path, "run", teacher, 'model.options.symbols=["?", "S", "0", "1"]')
    with pytest.raises(ConfigError, match="reads other tokens"):
        ladder.train(recipe, display=Display(quiet=True))
    assert not (tmp_path / "run").exists()
