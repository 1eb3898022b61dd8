"""When memory runs out: the same gradients from smaller micro-batches, said once, kept by a resumed run."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interruptions import Crash, at_call, crash
from spine import digit_recipe, gradients, lines, random_samples, sample, tiny_policy

from stepladder import ladder
from stepladder.algorithms import ALGORITHMS
from stepladder.data.batching import PackedBatch, pack
from stepladder.data.samples import StepSample
from stepladder.errors import OutOfMemory
from stepladder.policies import policy as policy_module
from stepladder.policies.heads import ScoredModel
from stepladder.policies.optimizer import MasterOptimizer
from stepladder.policies.policy import Policy
from stepladder.recipe.preference import PreferenceSection
from stepladder.recipe.rl_credit import CriticSection
from stepladder.reports.summary import summarise
from stepladder.run.progress import Display
from stepladder.rungs.distillation.update import distillation_update
from stepladder.rungs.preference.update import Answer, Judged, Pair, kto_update, pair_loss, preference_update
from stepladder.rungs.reward_model.process_update import step_update
from stepladder.rungs.reward_model.ranking_update import Ranked, ranking_update
from stepladder.rungs.rl import loop as rl
from stepladder.rungs.rl.critic import Critic
from stepladder.rungs.rl.update import RlBatch, UpdateRules, rl_update
from stepladder.rungs.supervised import sft_update
from stepladder.types import TrainingSample
from stepladder.workbench.memory import MemoryLimit, ran_out, smaller_budget

CPU = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"


class SmallMachine:
    """Rows of more than `limit` tokens do not fit; a first part may, which leaves gradients."""

    def __init__(self, limit: int, error: Callable[[], BaseException] = lambda: RuntimeError(CPU)) -> None:
        self.limit, self.error, self.failures = limit, error, 0

    def pack(self, samples: Sequence[TrainingSample], **how: bool) -> PackedBatch:
        if torch.is_grad_enabled() and pack(samples).num_tokens > self.limit:
            self.failures += 1
            raise self.error()
        return pack(samples, **how)


class Kept(MasterOptimizer):
    """An optimiser that takes no step and keeps the gradients."""

    def step(self, lr: float) -> float:
        self.kept = {name: p.grad.clone() for name, p in self.parameters.items() if p.grad is not None}
        self.clear()
        return 0.0


def assert_equal(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """Every entry within 1e-6 of the gradient's length: another order of float32 sums."""
    assert got.keys() == wanted.keys()
    length = torch.stack([g.norm() for g in wanted.values()]).norm()
    assert max(float((got[n] - g).abs().max()) for n, g in wanted.items()) <= 1e-6 * max(1.0, float(length))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], SmallMachine]:
    def make(limit: int) -> SmallMachine:
        small = SmallMachine(limit)
        monkeypatch.setattr(policy_module, "pack", small.pack)
        return small

    return make


# -- what is an allocator's failure, and what is cut -------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (MemoryError(), True),
        (RuntimeError(CPU), True),
        (RuntimeError("std::bad_alloc"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError(CPU), False),
    ],
)
def test_an_allocator_that_found_nothing(error: BaseException, is_one: bool) -> None:
    assert ran_out(error) is is_one


def test_the_next_budget_is_the_first_half_that_cuts() -> None:
    """Four samples of 10 tokens, no prefix shared: 40 tokens in one micro-batch at 4096.

    4096/2^6 = 64 still holds all 40; 32 holds three and one. From 32: 16 holds one each, which is the end.
    """
    four = [sample(range(10 * i, 10 * i + 10), 3, trajectory=str(i), group=str(i)) for i in range(4)]
    assert smaller_budget(four, 4096) == 32
    assert smaller_budget(four, 32) == 16
    assert smaller_budget(four, 16) is None
    assert smaller_budget(four[:1], 4096) is None


def test_a_trajectory_that_was_split_cannot_be_cut() -> None:
    """Ratios are taken over all of a trajectory, so its two samples stay in one micro-batch."""
    parts = [sample(range(10), 3, trajectory="t"), sample(range(20, 30), 3, trajectory="t")]
    assert smaller_budget(parts, 4096) is None


# -- every update ------------------------------------------------------------------------------------------

Update = Callable[[Kept, int], dict[str, float]]


def reinforce(policy: Policy, samples: list[TrainingSample]) -> tuple[RlBatch, UpdateRules]:
    n, width = len(samples), max(len(s.token_ids) for s in samples)
    advantages = torch.linspace(-1, 1, n)
    batch = RlBatch(samples, advantages, torch.arange(n), torch.tensor([i % 2 for i in range(n)]))
    batch.values, batch.returns = torch.zeros(n, width), torch.ones(n, width)
    return batch, UpdateRules(row=ALGORITHMS["reinforce"])


def cases(name: str) -> tuple[Any, list[TrainingSample], Update]:
    """(what is trained, the samples that are cut, the update as a function of optimiser and budget)"""
    policy, samples = tiny_policy(), random_samples(8, seed=3)
    paired = [
        sample(s.token_ids, s.mask.index(True), trajectory=f"p{i // 2}", group=f"p{i // 2}")
        for i, s in enumerate(samples)
    ]
    answers = [Answer(s, torch.full((s.num_trained,), -2.0)) for s in paired]
    rate: dict[str, Any] = {"learning_rate": 0.0}
    if name == "sft":
        return policy, samples, lambda o, t: sft_update(policy, o, samples, token_budget=t, **rate)
    if name == "dpo":
        pairs = [Pair(a, b) for a, b in zip(answers[::2], answers[1::2], strict=True)]
        loss = pair_loss(PreferenceSection(data="x"))
        return policy, paired, lambda o, t: preference_update(policy, o, pairs, loss, token_budget=t, **rate)
    if name == "kto":
        alone = [Answer(s, torch.full((s.num_trained,), -2.0)) for s in samples]
        section = PreferenceSection(data="x", loss="kto")
        judged = [Judged(a, b, i % 2 == 0) for i, (a, b) in enumerate(zip(alone, alone[::-1], strict=True))]
        return policy, samples, lambda o, t: kto_update(policy, o, judged, section, token_budget=t, **rate)
    if name == "ranking":
        model: Any = ScoredModel(policy)
        rows = [Ranked(tuple(paired[i : i + 2]), (0,), (1,), (0.0,)) for i in range(0, 8, 2)]
        return (
            model,
            paired,
            lambda o, t: ranking_update(model, o, rows, centring=0.1, token_budget=t, **rate),
        )
    if name == "steps":
        model = ScoredModel(policy)
        marked = [StepSample(s, (len(s.token_ids) - 1,), (float(i % 2),)) for i, s in enumerate(samples)]
        return model, samples, lambda o, t: step_update(model, o, marked, token_budget=t, **rate)
    if name == "distillation":
        teacher = tiny_policy(seed=1)
        options: dict[str, Any] = {"loss": "divergence", "beta": 1.0, "temperature": 1.0, **rate}
        return (
            policy,
            samples,
            lambda o, t: distillation_update(policy, teacher, o, samples, token_budget=t, **options),
        )
    batch, rules = reinforce(policy, samples)
    if name == "critic":
        critic = Critic(policy, CriticSection(), token_budget=4096, max_grad_norm=1.0)
        return critic.model, samples, lambda o, t: own(critic, o, batch, t)
    shared = Critic(policy, CriticSection(trunk="shared"), token_budget=4096, max_grad_norm=1.0)
    also = shared.loss(batch, coefficient=0.1) if name == "rl with a shared critic" else None

    def update(optimizer: Kept, tokens: int) -> dict[str, float]:
        cut = UpdateRules(row=rules.row, token_budget=tokens)
        return rl_update(policy, optimizer, batch, cut, learning_rate=0.0, also=also)

    return (shared.model if also else policy), samples, update


def own(critic: Critic, optimizer: Kept, batch: RlBatch, tokens: int) -> dict[str, float]:
    critic.optimizer = optimizer
    return critic.update(batch, rate=0.0, token_budget=tokens)


@pytest.mark.parametrize(
    "name",
    ["sft", "dpo", "kto", "ranking", "steps", "distillation", "rl", "rl with a shared critic", "critic"],
)
def test_every_update_is_made_again_with_the_same_gradients(
    name: str, machine: Callable[[int], SmallMachine]
) -> None:
    model, samples, update = cases(name)
    optimizer = Kept(model.trainable())
    honest = update(optimizer, 4096)
    whole, said = optimizer.kept, []
    small = machine(30)
    memory = MemoryLimit(say=said.append)
    metrics = memory.fit(samples, 4096, optimizer, lambda tokens: update(optimizer, tokens))
    assert small.failures == len(said) > 0
    assert memory.tokens is not None
    assert metrics["token_budget"] == memory.tokens
    assert metrics["loss" if name != "critic" else "value_loss"] == pytest.approx(
        honest["loss" if name != "critic" else "value_loss"], abs=1e-5
    )
    assert_equal(optimizer.kept, whole)
    memory.fit(samples, 4096, optimizer, lambda tokens: update(optimizer, tokens))
    assert small.failures == len(said)  # the smaller budget stays: nothing fails twice


@settings(max_examples=10, deadline=None)
@given(st.integers(2, 9), st.integers(1, 4), st.integers(26, 60), st.integers(0, 999))
def test_no_limit_changes_the_gradient(count: int, groups: int, limit: int, seed: int) -> None:
    """Whatever fits: the gradients are those of the whole, and what a failed pass left is gone."""
    policy, samples = tiny_policy(), random_samples(count, groups=groups, seed=seed)
    optimizer = Kept(policy.trainable())

    def update(tokens: int) -> dict[str, float]:
        return sft_update(policy, optimizer, samples, learning_rate=0.0, token_budget=tokens)

    update(4096)
    whole, small, honest = optimizer.kept, SmallMachine(limit), policy_module.pack
    policy_module.pack = small.pack  # type: ignore[assignment]
    try:
        MemoryLimit(say=lambda text: None).fit(samples, 4096, optimizer, update)
    finally:
        policy_module.pack = honest
    assert_equal(optimizer.kept, whole)
    assert all(not g.any() for g in gradients(policy).values())


def test_half_precision_leaves_no_gradient_behind() -> None:
    """A collector that finds no memory leaves the model's own gradient; `clear` drops it as well."""
    policy = tiny_policy(dtype=torch.bfloat16)
    optimizer = MasterOptimizer(policy.trainable())
    first = next(iter(policy.trainable().values()))
    first.grad = torch.ones_like(first)
    optimizer.clear()
    assert first.grad is None


def test_a_trajectory_too_long_for_the_memory_is_made_with_recomputed_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The allocator fails while layers keep everything; then the update is the same, and it is said."""
    policy = tiny_policy()
    samples = [sample(range(40), 3)]
    wanted = gradients_of(policy, samples)
    honest = policy_module.pack

    def fails_once(some: Sequence[TrainingSample], **how: bool) -> PackedBatch:
        if torch.is_grad_enabled() and not memory.recomputing:
            raise RuntimeError(CPU)
        return honest(some, **how)

    monkeypatch.setattr(policy_module, "pack", fails_once)
    said: list[str] = []
    memory = MemoryLimit(say=said.append, recompute=policy.recompute_layers)
    optimizer = Kept(policy.trainable())
    memory.fit(
        samples,
        4096,
        optimizer,
        lambda tokens: sft_update(policy, optimizer, samples, learning_rate=1.0, token_budget=tokens),
    )
    assert_equal(optimizer.kept, wanted)
    assert len(said) == 1
    assert "activation checkpointing" in said[0]
    resumed, other = MemoryLimit(), tiny_policy()
    resumed.recompute = other.recompute_layers
    resumed.load(memory.state())
    assert resumed.recomputing
    assert not other.recompute_layers()  # it was turned on


def gradients_of(policy: Policy, samples: Sequence[TrainingSample]) -> dict[str, torch.Tensor]:
    optimizer = Kept(policy.trainable())
    sft_update(policy, optimizer, samples, learning_rate=1.0, token_budget=4096)
    optimizer.close()
    return optimizer.kept


# -- what cannot be helped ---------------------------------------------------------------------------------


def test_one_sample_that_does_not_fit(machine: Callable[[int], SmallMachine]) -> None:
    policy = tiny_policy()
    long = [
        sample(range(10, 30), 3, trajectory="a", group="a"),
        sample(range(40), 3, trajectory="b", group="b"),
    ]
    optimizer, small = MasterOptimizer(policy.trainable()), machine(35)
    before = {n: p.detach().clone() for n, p in policy.trainable().items()}
    memory = MemoryLimit(say=lambda text: None)
    with pytest.raises(OutOfMemory, match=r"the longest, 'b', has 40 tokens"):
        memory.fit(
            long,
            4096,
            optimizer,
            lambda tokens: sft_update(policy, optimizer, long, learning_rate=1.0, token_budget=tokens),
        )
    assert small.failures == 2
    assert all(torch.equal(before[n], p) for n, p in policy.trainable().items())


def test_the_optimiser_itself_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, samples = tiny_policy(), random_samples(4)
    optimizer = MasterOptimizer(policy.trainable())

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError(CPU)

    monkeypatch.setattr(optimizer.adam, "step", fail)
    calls = []

    def update(tokens: int) -> dict[str, float]:
        calls.append(tokens)
        return sft_update(policy, optimizer, samples, learning_rate=1.0, token_budget=tokens)

    with pytest.raises(OutOfMemory, match="its two moments take"):
        MemoryLimit(say=lambda text: None).fit(samples, 4096, optimizer, update)
    assert calls == [4096]


def test_another_error_is_no_lack_of_memory() -> None:
    policy = tiny_policy()
    optimizer = MasterOptimizer(policy.trainable())

    def update(tokens: int) -> dict[str, float]:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="shapes cannot"):
        MemoryLimit().fit(random_samples(4), 4096, optimizer, update)


# -- a run -------------------------------------------------------------------------------------------------


def test_a_run_says_it_once_and_a_resumed_one_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory runs out at the first SFT step; RL, and RL after a kill, never ask for more again."""
    small, notes = SmallMachine(30), []
    monkeypatch.setattr(policy_module, "pack", small.pack)
    display = Display(quiet=True)
    monkeypatch.setattr(display, "note", notes.append)
    recipe = digit_recipe(tmp_path)
    at_call(monkeypatch, rl, "rl_update", 4, crash, after=True)  # RL saves every second step
    with pytest.raises(Crash):
        ladder.train(recipe, display=display)
    failures = small.failures
    assert 0 < failures == sum("memory ran out in an update" in note for note in notes)
    monkeypatch.undo()
    small.failures = 0
    monkeypatch.setattr(policy_module, "pack", small.pack)
    path = ladder.resume(tmp_path / "run", display=Display(quiet=True))
    assert small.failures == 0
    logged = [line for line in lines(path / "metrics.jsonl") if "grad_norm" in line]
    budgets = {line["token_budget"] for line in logged if "token_budget" in line}
    assert {line["phase"] for line in logged} == {"sft", "rl"}
    assert len(budgets) == 1
    assert "Memory ran out at sft step 1: micro-batches of" in summarise(path)


REAL = """
import resource, sys
import torch
torch.set_num_threads(1)
sys.path.insert(0, sys.argv[1])
from spine import sample
from stepladder.data.tiny_tokenizer import tiny_tokenizer
from stepladder.policies.optimizer import MasterOptimizer
from stepladder.policies.policy import Policy
from stepladder.policies.tiny import tiny_model
from stepladder.workbench.memory import MemoryLimit
from stepladder.rungs.supervised import sft_update

tokenizer = tiny_tokenizer()
model = tiny_model(len(tokenizer), hidden=128, layers=4, intermediate=512, max_positions=512)
policy = Policy(model, tokenizer)
optimizer = MasterOptimizer(policy.trainable())
samples = [
    sample([(7 * i + 3 * j) % 90 for j in range(256)], 4, trajectory=str(i), group=str(i)) for i in range(16)
]
update = lambda tokens: sft_update(policy, optimizer, samples, learning_rate=1e-4, token_budget=tokens)
update(256)  # libraries have their buffers, the optimiser its moments
memory = MemoryLimit(say=print)
used = int(open("/proc/self/statm").read().split()[5]) * resource.getpagesize()  # data + stack
resource.setrlimit(resource.RLIMIT_DATA, (used + int(sys.argv[2]) * 2**20,) * 2)
metrics = memory.fit(samples, 4096, optimizer, update)
print("RESULT", memory.tokens, metrics["token_budget"])
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits of a process's data")
def test_a_real_allocator_that_finds_nothing() -> None:
    """4,096 tokens keep about 230 MB of activations; with room for 100 MB they are cut until they fit."""
    got = subprocess.run(
        [sys.executable, "-c", REAL, str(Path(__file__).parent.parent), "100"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert got.returncode == 0, got.stderr[-2000:]
    assert "can't allocate memory" in got.stdout
    result = got.stdout.splitlines()[-1].split()
    assert result[0] == "RESULT"
    assert 256 <= int(result[1]) < 4096
