"""Process reward models: on labelled steps, on labels made by rollouts; what they are worth, and resume."""

from __future__ import annotations

import asyncio
import io
import json
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import scoring_runs as runs
import torch
from rich.console import Console
from spine import sample, tiny_policy

from stepladder import ladder
from stepladder.commands.inspect import inspect_recipe
from stepladder.data.samples import StepSample
from stepladder.environments.worlds.step_sums import StepSumsEnvironment, StepSumsWorld
from stepladder.errors import ConfigError, DataError, RunStopped
from stepladder.policies.conversation_scorer import ConversationScorer
from stepladder.policies.heads import ScalarHead, ScoredModel
from stepladder.policies.optimizer import MasterOptimizer
from stepladder.rungs.reward_model import process_rung as process_reward_model
from stepladder.rungs.reward_model import step_labels
from stepladder.rungs.reward_model.process_update import step_losses, step_update, step_validation
from stepladder.rungs.reward_model.step_data import supervised
from stepladder.rungs.reward_model.step_labels import Prefix, split_steps, step_cuts
from stepladder.types import Message, Score, Step, Task, Trajectory, Turn


@pytest.fixture(autouse=True)
def _a_checkpoint_every_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladder, "CHECKPOINT_SECONDS", 0.0)


def recipe(folder: Path, name: str, *overrides: str) -> Any:
    file = runs.write_steps(folder / f"{name}.jsonl")
    return runs.recipe(
        folder, name, "process_reward_model", file, "process_reward_model.epochs=8", *overrides
    )


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.train(recipe(tmp_path_factory.mktemp("quiet"), "run"))


# -- steps with labels -------------------------------------------------------------------------------------


def test_it_judges_held_out_steps_as_the_known_rule_does(quiet: Path) -> None:
    info = json.loads((quiet / "process_reward_model" / "reward_model.json").read_text())
    assert info["kind"] == "process"
    # By guessing, 27 of the 35 wrong steps or more would be found once in a thousand runs; processors differ:
    # on some 31 are found, on others all.
    assert info["held_out"]["validation_accuracy_right"] > 0.75
    assert info["held_out"]["validation_accuracy_wrong"] > 0.75
    scorer = ConversationScorer.load(quiet / "process_reward_model", dtype="float32", device="cpu")
    (steps,) = scorer.step_logprobs([[Message("user", "abc?"), Message("assistant", "ab\nfb\ndd")]])
    assert steps is not None
    right = [logprob > torch.tensor(0.5).log().item() for logprob in steps]
    assert right == [True, False, True]


def test_a_resumed_run_is_the_quiet_run(tmp_path: Path, quiet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest, calls = process_reward_model.step_update, 0

    def stopping(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 7:
            signal.raise_signal(signal.SIGINT)
        return honest(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(process_reward_model, "step_update", stopping)
        with pytest.raises(RunStopped, match="process_reward_model step 7"):
            runs.train(recipe(tmp_path, "run"))
    runs.resume(tmp_path / "run")
    got, wanted = (runs.left_behind(path, "process_reward_model") for path in (tmp_path / "run", quiet))
    assert got == wanted


def solution(ids: Sequence[int], ends: Sequence[int], labels: Sequence[float], key: str = "g") -> StepSample:
    return StepSample(sample(ids, 2, trajectory=key, group=key), tuple(ends), tuple(labels))


def test_the_loss_by_hand() -> None:
    """p = (.9, .8, .4), y = (1, 1, 0): 0.279777 (spec), the mean of −log .9, −log .8 and −log .6."""
    model = ScoredModel(tiny_policy())
    logits = torch.logit(torch.tensor([0.9, 0.8, 0.4]))
    model.at = lambda samples, positions: (logits, 0)  # type: ignore[method-assign]
    losses, _, _, metrics, _ = step_losses(model, [solution((9, 10, 11, 12, 13), (2, 3, 4), (1, 1, 0))])
    assert float(losses.mean()) == pytest.approx(0.279777, abs=1e-6)
    assert float(metrics["accuracy"]) == 1.0
    found, table = step_validation(
        model, [solution((9, 10, 11, 12, 13), (2, 3, 4), (1, 1, 0))], token_budget=99
    )
    # |.9 − 1| + |.8 − 1| + |.4 − 0| over three bins of one
    assert found["validation_ece"] == pytest.approx(0.7 / 3, abs=1e-6)
    assert found["validation_accuracy_wrong"] == 1.0
    assert sum(n for _, _, n in table) == 3


def test_fault_26_every_step_counts_once_however_solutions_are_cut() -> None:
    """Solutions of 1 and 4 steps: the mean over 5 steps, not the mean of two means."""
    rows = [
        solution((9, 10, 11), (2,), (1.0,), "a"),
        solution((9, 12, 13, 14, 15, 16), (2, 3, 4, 5), (0, 1, 0, 0.25), "b"),
    ]
    found = []
    for budget in (4, 1000):
        policy = tiny_policy()
        model = ScoredModel(policy, head=ScalarHead(policy.hidden_size, scale=0.3))
        wanted = torch.cat([step_losses(model, [row])[0].detach() for row in rows]).mean()
        optimizer = MasterOptimizer(model.trainable(), max_grad_norm=1e9)
        metrics = step_update(model, optimizer, rows, learning_rate=0.0, token_budget=budget)
        assert metrics["loss"] == pytest.approx(float(wanted), rel=1e-5)
        assert metrics["steps"] == 5
        found.append(metrics["grad_norm"])
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_to_first_wrong_leaves_out_what_follows_a_wrong_step(tmp_path: Path) -> None:
    settings = recipe(tmp_path, "r", "process_reward_model.supervise=to_first_wrong").process_reward_model
    row = solution(range(9, 15), (2, 3, 4, 5), (1.0, 0.25, 0.0, 1.0))
    assert supervised(row, settings).labels == (1.0, 0.25)
    right = solution(range(9, 15), (2, 3), (1.0, 0.5))
    assert supervised(right, settings) == right


# -- labels by rollouts ------------------------------------------------------------------------------------

SUMS = {"name": "step_sums", "options": {"terms": 3}}


def sums_recipe(folder: Path, name: str, *overrides: str) -> Any:
    return runs.load_recipe(
        {
            "run": {"name": name, "out": str(folder), "threads": 1},
            "model": {
                "name": "tiny",
                "dtype": "float32",
                "options": {
                    "symbols": [*"0123456789+=", "\n"],
                    "hidden": 32,
                    "layers": 2,
                    "intermediate": 48,
                },
            },
            "environment": SUMS,
            "rollout": {"max_turns": 1, "max_tokens": 16, "max_context": 40},
            "sft": {"demonstrations": 40, "epochs": 3, "learning_rate": 1e-2, "validation": 0},
            "process_reward_model": {
                "monte_carlo": {"tasks": 6, "solutions_per_task": 2, "completions": 3, "labels": "soft"},
                "epochs": 1,
                "validation": 2,
            },
            "evaluation": {"raw": 0, "tasks": 4},
        },
        overrides,
    )


def test_labels_made_by_rollouts_are_kept_and_a_resumed_run_uses_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calm = runs.train(sums_recipe(tmp_path, "calm"))
    rows = [json.loads(line) for line in (calm / "steps.jsonl").read_text().splitlines()]
    assert rows
    for row in rows:
        assert len(row["labels"]) == len(row["steps"])
        assert row["labels"][-1] in (0.0, 1.0)  # the solution's own result
        for label in row["labels"][:-1]:
            assert min(abs(label - k / 3) for k in range(4)) < 1e-9  # a share of three completions
    honest = step_labels.monte_carlo_steps
    with monkeypatch.context() as patch:

        def once(*args: Any, **kwargs: Any) -> Any:
            signal.raise_signal(signal.SIGINT)
            return honest(*args, **kwargs)

        patch.setattr("stepladder.rungs.reward_model.step_data.monte_carlo_steps", once)
        with pytest.raises(RunStopped):
            runs.train(sums_recipe(tmp_path, "run"))
    runs.resume(tmp_path / "run")
    assert (tmp_path / "run" / "steps.jsonl").read_bytes() == (calm / "steps.jsonl").read_bytes()
    got, wanted = (runs.left_behind(path, "process_reward_model") for path in (tmp_path / "run", calm))
    assert got == wanted


def always_right(answer: str, task: Task) -> float:
    """A reward of the recipe that finds every answer right."""
    return 1.0


class UnjudgedEnvironment(StepSumsEnvironment):
    judges = False

    async def step(self, message: Message) -> Step:
        return Step(terminated=True)


class UnjudgedSums(StepSumsWorld):
    """The same tasks in a world that judges nothing itself: the recipe's rewards do."""

    def make(self) -> StepSumsEnvironment:
        return UnjudgedEnvironment()


def test_rewards_of_the_recipe_judge_the_labels_that_rollouts_make(tmp_path: Path) -> None:
    """A reward that is always 1 labels every step 1; without any judge the recipe is refused."""
    world = f"environment={{name = '{__file__}:UnjudgedSums', rewards = ['{__file__}:always_right']}}"
    run = runs.train(sums_recipe(tmp_path, "run", world))
    rows = [json.loads(line) for line in (run / "steps.jsonl").read_text().splitlines()]
    labels = [label for row in rows for label in row["labels"]]
    assert labels
    assert set(labels) == {1.0}
    unjudged = f"environment={{name = '{__file__}:UnjudgedSums'}}"
    with pytest.raises(ConfigError, match="judges nothing"):
        runs.train(sums_recipe(tmp_path, "other", unjudged))


def played(text: str, ids: Sequence[int], **changes: Any) -> Trajectory:
    task = StepSumsWorld(terms=3).get("train", 0)
    messages = (*task.messages, Message("assistant", text))
    turn = Turn((), tuple(ids), (0.0,) * len(ids), step_labels.Sampling(), (), "stop")
    return Trajectory("t", "g", task, (turn,), messages, (0.0,), Score(0.0), "terminated", **changes)


def test_a_prefix_ends_where_its_step_does_and_keeps_the_sampled_ids() -> None:
    tokenizer = tiny_policy().tokenizer
    text = "1+2=3\n\n3+0=3\n3+4=2\n"
    ids = tokenizer.encode(text, add_special_tokens=False)
    cuts = step_cuts(lambda part: str(tokenizer.decode(list(part))), played(text, ids), "\n")
    assert [text[:cut] for cut in cuts] == ["1+2=3\n", "1+2=3\n\n3+0=3\n"]
    assert split_steps(text, "\n") == ["1+2=3", "3+0=3", "3+4=2"]


def test_a_token_that_begins_the_next_step_is_left_out_of_the_prefix() -> None:
    pieces = {1: "ab", 2: "\nc", 3: "d"}
    cuts = step_cuts(lambda ids: "".join(pieces[i] for i in ids), played("ab\ncd", (1, 2, 3)), "\n")
    assert cuts == [1]


class Recorded:
    """A session that notes its prompts and always says the same."""

    def __init__(self, log: list[tuple[int, ...]], answer: tuple[int, ...]) -> None:
        self.log, self.answer = log, answer

    async def generate(self, prompt: Sequence[int], sampling: Any) -> Any:
        self.log.append(tuple(prompt))
        n = len(self.answer)
        return step_labels.Generation(self.answer, (-0.5,) * n, ((3, n),), "stop")

    def close(self) -> None:
        """Nothing to close."""


def test_completions_go_on_from_the_given_ids_and_are_scored_as_one_answer() -> None:
    from stepladder.data.chat.renderer import Renderer
    from stepladder.environments.environment import load_world
    from stepladder.play.rollout import Limits, rollout

    tokenizer = tiny_policy().tokenizer
    renderer, log = Renderer(tokenizer), []
    world = load_world("step_sums", terms=3)
    task = Task("t", messages=(Message("user", "1+2+3"),), reference="6")
    given = tuple(tokenizer.encode("1+2=3\n", add_special_tokens=False))
    rest = (*tokenizer.encode("3+3=6", add_special_tokens=False), tokenizer.eos_token_id)

    class Engine:
        def session(self, key: str) -> Recorded:
            return Recorded(log, rest)

    agents = step_labels.prefix_agents(
        Engine(),  # type: ignore[arg-type]
        renderer,
        [Prefix(0, 0, given)],
        2,
        temperature=1.0,
        max_tokens=32,
        max_context=64,
    )
    groups = asyncio.run(rollout(agents, world, [("g", task)], group_size=2, limits=Limits(), seed=0))
    opening = renderer.start(task.messages).prompt_ids
    assert log == [opening + given] * 2
    for trajectory in groups[0].trajectories:
        assert trajectory.messages[-1].text == "1+2=3\n3+3=6"
        assert trajectory.score.value == 1.0
        assert trajectory.turns[0].token_ids == given + rest


def test_a_solution_that_cannot_be_labelled_says_so(tmp_path: Path) -> None:
    cut = sums_recipe(tmp_path, "run", "rollout.max_tokens=1", "sft=null")
    with pytest.raises(DataError, match="can be labelled"):
        runs.train(cut)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("process_reward_model.solutions=4", "give one of process_reward_model.data"),
        ("process_reward_model.monte_carlo.completions=4", "monte_carlo.tasks: Field required"),
    ],
)
def test_contradictions_are_refused(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        recipe(tmp_path, "run", override)


def test_rows_without_labels_are_refused(tmp_path: Path) -> None:
    made = recipe(tmp_path, "run")
    rows = [{"prompt": "ab?", "steps": ["a", "b"]}] * 60
    (tmp_path / "run.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match="0 labels for 2 steps"):
        runs.train(made)


def test_inspect_shows_where_each_step_ends(tmp_path: Path) -> None:
    console = Console(record=True, width=100, file=io.StringIO(), force_terminal=True)
    inspect_recipe(recipe(tmp_path, "run"), samples=1, console=console)
    text = console.export_text()
    assert "process_reward_model: 120 solutions to train on, 40 held out" in text
    assert "train-0  3 steps" in text
