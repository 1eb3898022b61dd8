"""The rung of preference optimisation: a whole run, its reference, its data, and that no kill shows."""

from __future__ import annotations

import io
import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from interruptions import Crash, at_call, crash
from rich.console import Console
from spine import DIGIT_SYMBOLS, SIZES, digit_recipe, lines, sample, tiny_policy

from stepladder import ladder
from stepladder.commands.inspect import inspect_recipe
from stepladder.errors import CheckpointError, ConfigError, DataError, InvariantError
from stepladder.objectives.kto import mismatched_answers
from stepladder.policies.checkpoint import CheckpointStore
from stepladder.policies.optimizer import MasterOptimizer
from stepladder.policies.policy import Policy
from stepladder.policies.tensors import load_tensors
from stepladder.recipe.config import Recipe, load_recipe
from stepladder.recipe.preference import LimitsSection
from stepladder.run.progress import Display
from stepladder.rungs.epochs import EpochState
from stepladder.rungs.preference import rung as preference
from stepladder.rungs.preference.data import PairData, as_pair, fixed_batches, mismatched_rows, with_reference
from stepladder.rungs.preference.reference_logprobs import FILE, ReferenceLog
from stepladder.rungs.preference.rung import learning_rate, run_preference
from stepladder.rungs.preference.update import Pair
from stepladder.types import TrainingSample


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    cache = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("STEPLADDER_CACHE", str(cache))
    monkeypatch.setattr(ladder, "CHECKPOINT_SECONDS", 0.0)
    return cache


def write_pairs(path: Path, count: int = 26) -> Path:
    """Which digit comes first: chosen answers begin with the digit asked, rejected ones with another."""
    rows = []
    for i in range(count):
        a, b = str(i % 5), str((i // 5) % 5)
        rows.append(
            {
                "prompt": [{"role": "user", "content": f"{a}{b}?{'S' * (i // 25)}"}],
                "chosen": [{"role": "assistant", "content": a}],
                "rejected": [{"role": "assistant", "content": str((i + 1) % 5)}],
            }
        )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def recipe(out: Path, name: str = "run", *overrides: str) -> Recipe:
    """A tiny model on a file of pairs: no environment, a second."""
    out.mkdir(parents=True, exist_ok=True)
    data = write_pairs(out / "pairs.jsonl")
    return load_recipe(
        {
            "run": {"name": name, "out": str(out), "threads": 1},
            "model": {
                "name": "tiny",
                "dtype": "float32",
                "options": {"symbols": list(DIGIT_SYMBOLS), **SIZES},
            },
            "preference": {
                "data": str(data),
                "epochs": 3,
                "batch_size": 7,
                "learning_rate": 3e-3,
                "validation": 6,
                "patience": 3,
                "token_budget": 200,
            },
        },
        overrides,
    )


def train(made: Recipe) -> Path:
    return ladder.train(made, display=Display(quiet=True))


def resume(path: Path) -> Path:
    return ladder.resume(path, display=Display(quiet=True))


def outcome(run: Path) -> tuple[dict[str, bytes], list[dict[str, Any]]]:
    (file,) = (run / "final").glob("*model.safetensors")
    tensors = load_tensors(file)
    return {n: t.float().numpy().tobytes() for n, t in tensors.items()}, lines(run / "metrics.jsonl")


# -- a run --------------------------------------------------------------------------------------------------


def test_a_run_learns_its_pairs_and_says_so(tmp_path: Path) -> None:
    run = train(recipe(tmp_path))
    metrics = lines(run / "metrics.jsonl")
    steps = [m for m in metrics if "validation_loss" not in m]
    checked = [m for m in metrics if "validation_loss" in m]
    assert [m["step"] for m in steps] == list(range(1, 10))  # 20 rows: 3 batches of 7, 7, 6; 3 epochs
    assert [m["pairs"] for m in steps] == [7, 7, 6] * 3
    assert steps[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)  # fault 71
    assert steps[0]["margin"] == pytest.approx(0, abs=1e-5)
    assert steps[-1]["margin"] > 0.01
    assert steps[-1]["kl"] > 0
    assert checked[-1]["validation_loss"] < math.log(2)
    assert {m["phase"] for m in metrics} == {"preference"}
    assert (run / FILE).is_file()


def test_held_out_and_trained_prompts_have_nothing_in_common(tmp_path: Path) -> None:
    made = recipe(tmp_path)
    from stepladder.workbench.prepare import prepare

    bench = prepare(made)
    assert made.preference is not None
    rows = preference.preference_rows(bench, made.preference, tmp_path, seed=0)
    prompts = [{r.prompt[0].text for r in side} for side in rows]
    assert len(rows[1]) == 6
    assert not prompts[0] & prompts[1]
    bench.close()


OTHERS = {
    "simpo": ("preference.simpo.gamma=1.0",),
    "orpo": (),
    "kto": (),
    "cdpo": ("preference.sft_weight=0.1", "preference.schedule=linear", "preference.warmup_steps=1"),
}


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run of an epoch by each of these losses."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STEPLADDER_CACHE", str(tmp_path_factory.mktemp("cache")))
        folder = tmp_path_factory.mktemp("others")
        return {
            loss: train(recipe(folder, loss, f"preference.loss={loss}", "preference.epochs=1", *more))
            for loss, more in OTHERS.items()
        }


@pytest.mark.parametrize("loss", OTHERS)
def test_the_other_losses_run_too(others: dict[str, Path], loss: str) -> None:
    metrics = lines(others[loss] / "metrics.jsonl")
    assert all(m["grad_norm"] > 0 for m in metrics if "grad_norm" in m)  # fault 77
    assert (others[loss] / FILE).is_file() == (loss not in ("simpo", "orpo"))
    if loss == "kto":  # both sides of 20 pairs, and at step 0 half the weight of each answer
        assert sum(m.get("pairs", 0) for m in metrics) == 2 * 23
        assert metrics[0]["loss"] == pytest.approx(0.5, abs=1e-5)
        assert metrics[0]["reference_point"] == pytest.approx(0, abs=1e-5)


def test_every_metric_is_on_the_page(quiet: Path, others: dict[str, Path]) -> None:
    page = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text(encoding="utf-8")
    (section,) = re.findall(r'^## phase "preference"\n(.*?)^## ', page, re.MULTILINE | re.DOTALL)
    first = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    documented = {name for cell in first for name in re.findall(r"`([^`]+)`", cell)}
    found = {name for run in (quiet, *others.values()) for m in raw_lines(run) for name in m}
    assert found - {"step", "phase"} == documented


def raw_lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


# -- no interruption shows ----------------------------------------------------------------------------------


PLACES: list[Any] = [
    pytest.param(ReferenceLog, "_compute", 1, True, id="reference"),
    pytest.param(preference, "preference_update", 1, False, id="before-the-first-update"),
    pytest.param(preference, "preference_update", 5, True, id="inside-an-epoch"),
    pytest.param(preference, "validation", 3, True, id="validation"),
    pytest.param(CheckpointStore, "save", 2, True, id="after-an-epoch"),
    pytest.param(CheckpointStore, "save", 4, False, id="end-of-the-rung"),
]


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody disturbed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STEPLADDER_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(ladder, "CHECKPOINT_SECONDS", 0.0)
        return train(recipe(tmp_path_factory.mktemp("quiet")))


@pytest.mark.parametrize(("owner", "name", "call", "after"), PLACES)
def test_a_killed_run_resumes_to_the_same_end(
    tmp_path: Path,
    quiet: Path,
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    call: int,
    after: bool,
    own_cache: Path,
) -> None:
    """Bit for bit, and without the user's cache."""
    with monkeypatch.context() as patch:
        at_call(patch, owner, name, call, crash, after=after)
        with pytest.raises(Crash):
            train(recipe(tmp_path))
    shutil.rmtree(own_cache / "reference", ignore_errors=True)
    resume(tmp_path / "run")
    assert outcome(tmp_path / "run") == outcome(quiet)


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(("preference.loss=kto",), id="kto"),
        pytest.param(("model.lora.rank=4", "preference.reference=base"), id="adapter"),
        pytest.param(("model.dtype=bfloat16", "preference.schedule=linear"), id="bf16"),
        pytest.param(("preference.loss=simpo", "preference.simpo.gamma_beta_ratio=0.5"), id="simpo"),
    ],
)
def test_other_kinds_resume_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: tuple[str, ...]
) -> None:
    short = (*variant, "preference.epochs=2")
    calm = train(recipe(tmp_path / "calm", "run", *short))
    with monkeypatch.context() as patch:
        update = "kto_update" if "preference.loss=kto" in variant else "preference_update"
        at_call(patch, preference, update, 5, crash, after=True)
        with pytest.raises(Crash):
            train(recipe(tmp_path / "other", "run", *short))
    resume(tmp_path / "other" / "run")
    assert outcome(tmp_path / "other" / "run")[1] == outcome(calm)[1]


# -- the reference ------------------------------------------------------------------------------------------


def pairs_of(count: int = 4) -> list[Pair]:
    out = []
    for i in range(count):
        prompt = [20 + i, 21, 22]
        sides = [sample([*prompt, 40 + i, *range(50, 52 + k)], 3, group=f"p{i}") for k in range(2)]
        out.append(as_pair(*sides))
    return out


def samples_of(pairs: list[Pair]) -> list[TrainingSample]:
    return [answer.sample for pair in pairs for answer in pair.answers]


def test_fault_72_the_cache_is_hit_by_the_same_and_missed_by_anything_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed = 0
    honest = ReferenceLog._compute

    def counting(self: ReferenceLog, samples: Any) -> Any:
        nonlocal computed
        computed += 1
        return honest(self, samples)

    monkeypatch.setattr(ReferenceLog, "_compute", counting)
    samples = samples_of(pairs_of())

    def ask(policy: Policy, rows: list[TrainingSample], folder: str, **more: Any) -> Any:
        (tmp_path / folder).mkdir(exist_ok=True)
        return ReferenceLog(policy, tmp_path / folder, **more).of(rows)

    first = ask(tiny_policy(), samples, "a")
    again = ask(tiny_policy(), samples, "b")
    assert computed == 1
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    changed = [
        *samples[:-1],
        sample([20, 21, 22, 40, 60], 3, group="p3"),
    ]  # data, template, tokenizer, length
    ask(tiny_policy(), changed, "c")
    assert computed == 2
    wider = [*samples[:-1], sample(samples[-1].token_ids, 2, group="p3")]  # the same ids, another mask
    ask(tiny_policy(), wider, "c")
    assert computed == 3
    other = tiny_policy()
    with torch.no_grad():
        next(iter(other.trainable().values())).view(-1)[0] += 1e-3  # one weight of the model
    got = ask(other, samples, "a")
    assert computed == 4
    assert not all(torch.equal(x, y) for x, y in zip(first, got, strict=True))


def test_a_damaged_cache_is_computed_again(tmp_path: Path, own_cache: Path) -> None:
    samples = samples_of(pairs_of())
    first = ReferenceLog(tiny_policy(), tmp_path).of(samples)
    for file in (tmp_path / FILE, *(own_cache / "reference").iterdir()):
        file.write_bytes(file.read_bytes()[:100])
    again = ReferenceLog(tiny_policy(), tmp_path).of(samples)
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


def test_fault_49_a_trained_policy_is_never_taken_for_the_reference(tmp_path: Path, own_cache: Path) -> None:
    """Held-out pairs are in the log before the first step; other pairs are refused after it."""
    policy = tiny_policy()
    log = ReferenceLog(policy, tmp_path)
    data = with_reference(PairData(pairs_of(4), pairs_of(6)[4:]), log)
    truth = [answer.reference for pair in data.held for answer in pair.answers]  # type: ignore[union-attr]
    with torch.no_grad():
        for p in policy.trainable().values():
            p.add_(0.1)
    later = ReferenceLog(policy, tmp_path, weights=log.weights)
    same = with_reference(PairData(pairs_of(4), pairs_of(6)[4:]), later)
    for pair, k in zip(same.held, (0, 2)):
        assert torch.equal(pair.chosen.reference, truth[k])  # type: ignore[union-attr, arg-type]
    with pytest.raises(CheckpointError, match=r"has\s+trained since"):
        later.of(samples_of(pairs_of(7)))


def test_a_run_whose_data_changed_is_not_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = recipe(tmp_path)
    with monkeypatch.context() as patch:
        at_call(patch, preference, "preference_update", 5, crash, after=True)
        with pytest.raises(Crash):
            train(made)
    path = tmp_path / "pairs.jsonl"
    path.write_text(
        path.read_text().replace(
            '"chosen": [{"role": "assistant", "content": "0"}]',
            '"chosen": [{"role": "assistant", "content": "4"}]',
        )
    )
    with pytest.raises(CheckpointError, match="the data of the rung 'preference' changed"):
        resume(tmp_path / "run")


def test_the_disabled_adapter_is_the_base_and_the_start_adapter_is_not(tmp_path: Path) -> None:
    """The two references of LoRA: without the adapter, and the adapter that the rung began with."""
    from peft import LoraConfig, get_peft_model

    plain = tiny_policy()
    samples = samples_of(pairs_of(2))
    wanted = ReferenceLog(plain, tmp_path / "plain").of(samples)
    config = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    policy = Policy(get_peft_model(tiny_policy().lm, config), plain.tokenizer)
    with torch.no_grad():
        for name, p in policy.trainable().items():
            if "lora_B" in name:
                p.add_(0.05)
    base = ReferenceLog(policy, tmp_path / "base", base=True).of(samples)
    start = ReferenceLog(policy, tmp_path / "start").of(samples)
    for b, w, s in zip(base, wanted, start, strict=True):
        torch.testing.assert_close(b, w, rtol=1e-5, atol=1e-5)
        assert (s - w).abs().max() > 1e-3
    now = policy.logprobs(samples)  # and afterwards the adapter is on again
    torch.testing.assert_close(now.logprobs[0][now.mask[0]], start[0], rtol=1e-5, atol=1e-5)


def test_a_wrong_reference_stops_the_run_before_its_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = ReferenceLog._compute
    monkeypatch.setattr(ReferenceLog, "_compute", lambda self, rows: [t - 0.01 for t in honest(self, rows)])
    with pytest.raises(InvariantError, match="ln 2"):
        train(recipe(tmp_path))


# -- the known answer, by the real loop ---------------------------------------------------------------------


def test_dpo_converges_to_the_closed_form_in_the_real_loop(tmp_path: Path) -> None:
    """Three answers worth e^r = 1, 2, 3, and pairs in exactly the shares of Bradley-Terry: of i and j,
    i wins e^r_i times. So beta = 1 must give pi_ref * e^r / Z among them."""
    policy = tiny_policy(scale=0.1)
    worth = (1, 2, 3)
    answers = [sample([20, 21, 40 + i, 2], 2, group="all") for i in range(3)]
    before = torch.stack([t.sum() for t in ReferenceLog(policy, tmp_path).of(answers)])
    train_pairs = [
        as_pair(answers[i], answers[j]) for i in range(3) for j in range(3) if i != j for _ in range(worth[i])
    ]
    log = ReferenceLog(policy, tmp_path)
    data = with_reference(PairData(train_pairs, []), log)
    made = load_recipe(
        {
            "preference": {
                "data": "x",
                "beta": 1.0,
                "epochs": 150,
                "batch_size": 12,
                "learning_rate": 2e-3,
                "validation": 0,
            }
        }
    ).preference
    assert made is not None
    run_preference(
        policy,
        MasterOptimizer(policy.trainable()),
        data,
        made,
        EpochState(),
        seed=0,
        on_step=lambda step, metrics: None,
        on_epoch=lambda state: None,
    )
    with torch.no_grad():
        scores = policy.logprobs(answers)
        after = scores.logprobs.sum(-1).softmax(0)
    goal = (before + torch.tensor(worth).log()).softmax(0)
    distance = float((after - goal).abs().sum() / 2)
    assert float((before.softmax(0) - goal).abs().sum() / 2) > 0.05
    assert distance < 0.02


# -- data and settings ---------------------------------------------------------------------------------------


def test_batches_of_kto_are_fixed_and_none_has_one_row() -> None:
    batches = fixed_batches(9, 4, seed=0)
    assert sorted(map(len, batches)) == [4, 5]
    assert sorted(i for b in batches for i in b) == list(range(9))
    assert batches == fixed_batches(9, 4, seed=0) != fixed_batches(9, 4, seed=1)


@hypothesis_settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from("abcde"), min_size=2, max_size=9).filter(lambda p: len(set(p)) > 1))
def test_a_mismatched_answer_belongs_to_another_prompt(prompts: list[str]) -> None:
    """Nobody is compared with a true pair; each answer serves once where no prompt has more than half."""
    other = mismatched_rows(prompts)
    assert all(prompts[i] != prompts[j] for i, j in enumerate(other))
    if max(map(prompts.count, prompts)) <= len(prompts) / 2:
        assert sorted(other) == list(range(len(prompts)))
    if len(set(prompts)) == len(prompts):
        assert other == mismatched_answers(len(prompts)).tolist()


def test_a_batch_of_one_prompt_is_refused() -> None:
    with pytest.raises(DataError, match="belong to one prompt"):
        mismatched_rows(["a", "a"])


def test_the_learning_rate_warms_up_and_falls_to_0() -> None:
    def at(step: int, **more: Any) -> float:
        made = load_recipe({"preference": {"data": "x", "learning_rate": 1.0, "warmup_steps": 2, **more}})
        assert made.preference is not None
        return learning_rate(made.preference, step, 6)

    assert [at(k) for k in range(6)] == [0.5, 1, 1, 1, 1, 1]
    linear = [at(k, schedule="linear") for k in range(6)]
    assert linear == pytest.approx([0.5, 1, 0.75, 0.5, 0.25, 0])


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        pytest.param({}, "either preference.data or preference.pairs.*pairs=64", id="no-data"),
        pytest.param({"pairs": 4, "data": "x"}, "either preference.data", id="two-sources"),
        pytest.param(
            {"data": "x", "loss": "dpo", "simpo": {"gamma": 1.0}},
            "gamma=1.0.* means nothing.*simpo",
            id="gamma",
        ),
        pytest.param(
            {"data": "x", "label_smoothing": 0.1}, "label_smoothing=0.1.*cdpo, robust", id="smoothing"
        ),
        pytest.param({"data": "x", "loss": "simpo"}, "exactly one of simpo.gamma", id="no-gamma"),
        pytest.param(
            {"data": "x", "loss": "simpo", "simpo": {"gamma": 1.0}, "reference": "start"},
            'has no reference.*"none"',
            id="reference-free",
        ),
        pytest.param({"data": "x", "reference": "none"}, 'measured from a reference.*"start"', id="none"),
        pytest.param(
            {"data": "x", "loss": "kto", "batch_size": 1}, "batch_size=1.*batch_size=8", id="fault-74"
        ),
        pytest.param({"data": "x", "limits": {"keep": "start"}}, "max_prompt_tokens=512", id="keep"),
        pytest.param({"data": "x", "limits": {"overlong": "drop"}}, "max_completion_tokens=512", id="drop"),
        pytest.param({"data": "rejection_sampling"}, "no section .rejection_sampling.", id="no-earlier-rung"),
        pytest.param({"data": "x", "reference": "base"}, "there is no adapter", id="base-without-adapter"),
        pytest.param({"pairs": 64}, "asks an environment for pairs", id="no-environment"),
        pytest.param({"data": "x", "loss": "dop"}, "dop", id="typo"),
    ],
)
def test_contradictions_are_refused_before_anything_is_loaded(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        load_recipe({"preference": keys})


def test_a_world_without_pairs_and_a_file_too_small_are_refused(tmp_path: Path) -> None:
    base = {"model": {"name": "tiny"}, "run": {"out": str(tmp_path)}}
    with pytest.raises(ConfigError, match=r"no preferences\(count, seed\) method"):
        train(load_recipe({**base, "environment": {"name": "hidden_digit"}, "preference": {"pairs": 64}}))
    data = write_pairs(tmp_path / "few.jsonl", 5)
    with pytest.raises(DataError, match=r"has 5 pairs.*validation = 1"):
        train(load_recipe({**base, "preference": {"data": str(data)}}))


@pytest.mark.parametrize(("loss", "names"), [("dpo", ("chosen", "rejected")), ("kto", ("good", "bad"))])
def test_inspect_shows_what_is_pushed_up_and_down(tmp_path: Path, loss: str, names: tuple[str, ...]) -> None:
    out = io.StringIO()
    inspect_recipe(recipe(tmp_path, "run", f"preference.loss={loss}"), samples=40, console=Console(file=out))
    text = out.getvalue()
    assert f"preference ({loss})" in text
    assert "26 rows: 26 kept" in text or "52 rows: 52 kept" in text
    assert all(name in text for name in names)


def test_pairs_of_an_earlier_rung_are_taken_from_the_run_folder(tmp_path: Path) -> None:
    from stepladder.workbench.prepare import prepare

    made = recipe(tmp_path)
    bench = prepare(made)
    assert made.preference is not None
    settings = made.preference.model_copy(update={"data": "rejection_sampling"})
    rows, held = preference.preference_rows(bench, settings, tmp_path, seed=0)
    assert len(rows) + len(held) == 26  # tmp_path/pairs.jsonl
    bench.close()


def test_what_rejection_sampling_leaves_is_preferred_by_the_next_rung(tmp_path: Path) -> None:
    """Two rungs of one run: episodes of one task, a better and a worse one, become pairs and then weights."""
    made = digit_recipe(
        tmp_path,
        "run",
        "rl=null",
        "rejection_sampling.tasks=16",
        "rejection_sampling.temperature=0.5",  # at 1 it writes tokens that its alphabet cannot spell
        "rejection_sampling.epochs=1",
        "preference.data=rejection_sampling",
        "preference.validation=0",
        "preference.batch_size=4",
    )
    run = train(made)
    pairs = len((run / "pairs.jsonl").read_text().splitlines())
    metrics = [m for m in lines(run / "metrics.jsonl") if m["phase"] == "preference"]
    assert pairs > 1
    assert metrics[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert sum(m["pairs"] for m in metrics) <= pairs  # equal ones count once
    rungs = [e["rung"] for e in lines(run / "evaluations.jsonl")]
    assert rungs[-2:] == ["rejection_sampling", "preference"]


def test_faults_67_and_70_each_side_has_its_own_budget_and_every_option_does_something(
    tmp_path: Path,
) -> None:
    """Answers of 50 and 2 tokens, 40 allowed: both stay, the long one is cut; or the pair goes, counted."""
    from stepladder.rungs.preference.data import pair_data
    from stepladder.workbench.prepare import prepare

    made = recipe(tmp_path)
    bench = prepare(made)
    long = {"role": "assistant", "content": "1" * 50}
    short = {"role": "assistant", "content": "22"}
    row = {
        "prompt": [{"role": "user", "content": "01234012340123401234"}],
        "chosen": [long],
        "rejected": [short],
    }
    path = tmp_path / "one.jsonl"
    path.write_text(json.dumps(row))

    def load(**more: Any) -> tuple[list[Pair], Callable[[], str]]:
        assert made.preference is not None
        update = {"data": str(path), "validation": 0, "limits": LimitsSection(**more)}
        settings = made.preference.model_copy(update=update)
        rows, held = preference.preference_rows(bench, settings, tmp_path, seed=0)
        data, tally = pair_data(bench, rows, held, settings)
        return data.train, lambda: tally.text

    (pair,), text = load(max_completion_tokens=40)
    assert (pair.chosen.sample.num_trained, pair.rejected.sample.num_trained) == (40, 3)
    assert "1 completion cut" in text()
    assert load(max_completion_tokens=40, overlong="drop")[0] == []
    assert "1 dropped" in load(max_completion_tokens=40, overlong="drop")[1]()
    whole = load()[0][0].chosen.sample
    start = len(whole.token_ids) - whole.num_trained
    prompts = []
    for keep in ("end", "start"):
        cut = load(max_prompt_tokens=start - 6, keep=keep)[0][0]
        chosen, rejected = cut.chosen.sample, cut.rejected.sample
        prompts.append(chosen.token_ids[: start - 6])
        assert rejected.token_ids[: start - 6] == prompts[-1]  # fault 69: one prompt for both sides
        assert chosen.num_trained == 51
    assert prompts[0] != prompts[1]
    bench.close()
