"""Recipes: closed, explained, and every key means something."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

import stepladder
from stepladder.errors import ConfigError
from stepladder.recipe.config import Recipe, bundled_recipes, load_recipe, parse_recipe, rung_sections
from stepladder.recipe.rl import RlSection

ROOT = Path(stepladder.__file__).parent
BASE: dict[str, Any] = {"environment": {"name": "hidden_digit"}, "rl": {}}


def refused(data: dict[str, Any], *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_recipe(data, overrides)
    return str(caught.value)


# -- what is refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (
            "rl.learnig_rate=1",
            ["unknown key 'rl.learnig_rate'", "Did you mean 'learning_rate'?", "Known here:"],
        ),
        ("rll.steps=3", ["unknown key 'rll'", "Did you mean 'rl'?"]),
        ("model.lora.rnak=3", ["unknown key 'model.lora.rnak'", "Did you mean 'rank'?", "alpha"]),
        ("run.sead=1", ["Did you mean 'seed'?"]),
        ("zzzzz=1", ["unknown key 'zzzzz'", "environment"]),
    ],
)
def test_an_unknown_key_names_the_nearest(override: str, words: list[str]) -> None:
    """Fault 122."""
    message = refused(BASE, override)
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["rl=null"], ["trains nothing", "[sft] or an [rl]"]),
        (
            ["rollout.max_tokens=300", "rollout.max_context=300"],
            ["leaves no room for a prompt", "max_context = 1200"],
        ),
        (["model.lora.rank=8", "model.train_embeddings=false"], ["never trains the embeddings"]),
        (["model.options={ hidden = 32 }"], ["model.options sizes the tiny model", "model.name"]),
        (["sft.epochs=3"], ["give either sft.data or sft.demonstrations", "Try demonstrations=32"]),
        (["sft.data=x.jsonl", "sft.demonstrations=3"], ["give either", "'x.jsonl'"]),
        (["rl.algorithm=gprp"], ["no algorithm 'gprp'", "Did you mean 'grpo'?", "gspo"]),
        (["rl.algorithm=grpo", "rl.critic.lam=1.0"], ["no critic", "algorithm = 'ppo'"]),
        (["rl.algorithm=reinforce", "rl.clip_high=0.2"], ["no ratio to clip", "algorithm = 'grpo'"]),
        (["rl.algorithm=cispo", "rl.clip_absolute=true"], ["largest weight", "clip_high = 5.0"]),
        (["rl.algorithm=cispo", "rl.clip_absolute=true", "rl.clip_high=0.9"], ["0.9", "clip_high = 5.0"]),
        (["rl.algorithm=reinforce", "rl.scale=none"], ["does not divide", "scale='none'"]),
        (["rl.group_size=0"], ["rl.group_size", "greater than or equal to 1", "got 0"]),
        (["rl.group_size=1"], ["compares the episodes of a group", "group_size = 8"]),
        (["rl.algorithm=dapo", "rl.group_size=1"], ["group_size"]),
        (["rl.gamma=0.9"], ["gamma=0.9", "'grpo'", "algorithm = 'ppo'"]),
        (["rl.algorithm=ppo", "rl.advantage=m:f", "rl.gamma=0.9"], ["gamma=0.9"]),
        (["rl.turn_gamma=0.5"], ["turn_gamma=0.5", "credit='outcome'", "credit = 'turns'"]),
        (["rl.algorithm=ppo", "rl.credit=turns", "rl.turn_gamma=0.5"], ["turn_gamma=0.5", "use gamma"]),
        (["rl.algorithm=reinforce", "rl.correction=behaviour"], ["correction='behaviour'", "token_cap"]),
        (["rl.learning_rate=inf"], ["rl.learning_rate", "finite", "inf"]),
        (["rl.kl_coefficient=inf"], ["rl.kl_coefficient", "finite"]),
        (["rl.algorithm=GRPO"], ["'GRPO'", "Did you mean 'grpo'?"]),
        (["rl.kl_in=reward", "rl.kl_estimator=k3"], ["biased penalty", "take k1"]),
        (["rl.kl_estimator=k1"], ["no gradient on average", "take k2 or k3"]),
        (["rl.algorithm=dapo", "rl.kl_in=loss"], ["where a KL term stands", "kl_coefficient = 0.01"]),
        (["rl.kl_target=6.0"], ["kl_target=6", "in the loss", 'kl_in = "reward"']),
        (["rl.kl_coefficient=0", "rl.reference_every=5"], ["reference_every=5", "has none here"]),
        (["rl.entropy_target=1.0", "rl.entropy_coefficient=0.1"], ["is fixed", "give one"]),
        (["rl.credit=bilevel"], ["does not go with 'grpo'", "algorithm = 'ppo'"]),
        (["rl.algorithm=ppo", "rl.credit=gigpo"], ["does not go with 'ppo'", "algorithm = 'grpo'"]),
        (["rl.credit=turns", "rl.normalise=domain"], ["scores of whole episodes", "'task'"]),
        (
            ["rl.algorithm=reinforce", "rl.group_size=1", "rl.normalise=environment"],
            ["mean of a task's episodes", "group_size = 8", "leave normalise out"],
        ),
        (["rl.baseline=0.5"], ["fixed number of 'reinforce'"]),
        (["rl.advantage=a:b", "rl.credit=turns"], ["rl.advantage = 'a:b' replaces", "leave those out"]),
        (
            ["rl.algorithm=ppo", "rl.critic.trunk=shared", "rl.critic.warmup_steps=2"],
            ["a trunk of its own", "trunk = 'separate'"],
        ),
        (["rl.steps=0"], ["rl.steps", "got 0"]),
        (["rl.learning_rate=-1"], ["rl.learning_rate", "got -1"]),
        (["rl.learning_rate=fast"], ["rl.learning_rate", "'fast'"]),
        (["rl.stop_at_success=1.5"], ["rl.stop_at_success", "got 1.5"]),
        (["rollout.temperature=0"], ["rollout.temperature", "greater than 0"]),
        (["rl.aggregation=mean"], ["aggregation", "token_mean"]),
        (["model.dtype=float16"], ["model.dtype", "'float32'", "'bfloat16'"]),
        (["run.track=mlflow"], ["run.track", "tensorboard"]),
        (["run.name="], ["run.name", "under run.out", "'my-run'"]),
        (["run.name=../elsewhere"], ["run.name", "under run.out"]),
        (["evaluation.tasks=0"], ["evaluation.tasks"]),
        (["environment=null"], ["[rl] plays episodes", "add a section [environment]"]),
    ],
)
def test_a_contradiction_says_what_and_what_works(overrides: list[str], words: list[str]) -> None:
    message = refused(BASE, *overrides)
    assert all(word in message for word in words), message


def test_all_mistakes_are_named_at_once() -> None:
    message = refused(BASE, "rl.stepps=3", "run.sead=1", "rl.group_size=0")
    assert len(message.splitlines()) == 3


# -- overrides ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ("rl.steps=7", ("rl", "steps"), 7),
        ("rl.learning_rate=1e-3", ("rl", "learning_rate"), 1e-3),
        ("run.exact=false", ("run", "exact"), False),
        ("run.name=my-run", ("run", "name"), "my-run"),
        ('run.name="7"', ("run", "name"), "7"),
        ("model.name=./a=b", ("model", "name"), "./a=b"),
        ("model.lora.rank=4", ("model", "lora", "rank"), 4),
        ("run.track=none", ("run", "track"), "none"),  # a word, not TOML, and not Python's None
        (" rl.steps = 9 ", ("rl", "steps"), 9),
        ('model.lora.targets=["q_proj", "v_proj"]', ("model", "lora", "targets"), ("q_proj", "v_proj")),
    ],
)
def test_overrides(text: str, path: tuple[str, ...], value: Any) -> None:
    found: Any = load_recipe(BASE, [text])
    for part in path:
        found = getattr(found, part)
    assert found == value
    assert type(found) is type(value)


def test_null_removes_a_key_or_a_section() -> None:
    data = {**BASE, "rl": {"clip_low": 0.3, "stop_at_success": 0.9}, "sft": {"demonstrations": 3}}
    recipe = load_recipe(data, ["rl.clip_low=null", "sft=null"])
    assert recipe.rl is not None
    assert recipe.rl.clip_low is None
    assert recipe.rl.stop_at_success == 0.9
    assert recipe.sft is None


def test_the_dictionary_given_is_not_changed() -> None:
    data = {"environment": {"name": "hidden_digit"}, "rl": {"steps": 1}}
    load_recipe(data, ["rl.steps=2", "run.seed=3"])
    assert data == {"environment": {"name": "hidden_digit"}, "rl": {"steps": 1}}


@pytest.mark.parametrize("text", ["rl.steps", "=3", "--steps"])
def test_what_is_no_override_is_refused(text: str) -> None:
    assert "an override looks like" in refused(BASE, text)


def test_an_override_through_a_value_is_refused() -> None:
    assert "'seed', which is a value" in refused({**BASE, "run": {"seed": 1}}, "run.seed.x=1")


# -- files -------------------------------------------------------------------------------------------------


def test_a_file_with_a_byte_order_mark_and_windows_lines(tmp_path: Path) -> None:
    file = tmp_path / "r.toml"
    file.write_bytes(b'\xef\xbb\xbf[environment]\r\nname = "hidden_digit"\r\n[rl]\r\nsteps = 3\r\n')
    recipe = load_recipe(file)
    assert recipe.rl is not None
    assert recipe.rl.steps == 3


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"[rl\nsteps = 3", ["is not valid TOML"]), (b'name = "\xff"', ["UTF-8"]), (b"", ["trains nothing"])],
)
def test_a_file_that_is_no_recipe_is_refused(tmp_path: Path, content: bytes, words: list[str]) -> None:
    file = tmp_path / "r.toml"
    file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_recipe(file)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_missing_file_names_the_bundled_recipes() -> None:
    with pytest.raises(ConfigError, match=r"Did you mean 'calculator'\? Bundled: .*hidden_digit"):
        load_recipe("calculater")


@pytest.mark.parametrize("name", sorted(bundled_recipes()))
def test_bundled_recipes_load_and_say_what_they_are(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.run.name == name
    assert re.search(r"\b(2 cores|one core)\b", recipe.description)  # what it takes
    assert parse_recipe(recipe.model_dump(mode="json", exclude_none=True)) == recipe


# -- every key means something -----------------------------------------------------------------------------


def _sections(model: type[BaseModel] = Recipe) -> dict[str, type[BaseModel]]:
    """The recipe and every section that it reaches, by class name."""
    found = {model.__name__: model}
    for field in model.model_fields.values():
        todo = [field.annotation]
        while todo:
            kind = todo.pop()
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                found |= _sections(kind)
            todo += get_args(kind)
    return found


def _names_read() -> set[str]:
    """Attributes that the package reads, and names in tuples by which sections look up their own keys."""
    names: set[str] = set()
    for file in ROOT.rglob("*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                names.add(node.attr)
            elif file.parent.name == "recipe" and isinstance(node, ast.Tuple):
                names |= {e.value for e in node.elts if isinstance(e, ast.Constant)}
    return names


def test_the_walk_reaches_nested_tables() -> None:
    assert {"Recipe", "RlSection", "CriticSection", "LoraSection", "BonusSection"} <= set(_sections())


@pytest.mark.parametrize("section", sorted(_sections()))
def test_every_key_of_a_recipe_is_read_somewhere(section: str) -> None:
    """Nothing "will be ignored". The registry reads the sections of the rungs by their names."""
    ignored = set(_sections()[section].model_fields) - _names_read() - set(rung_sections())
    assert not ignored, f"{section} has keys that nothing reads: {sorted(ignored)}"


@pytest.mark.parametrize("section", sorted(_sections()))
def test_sections_are_closed_and_frozen(section: str) -> None:
    settings = _sections()[section].model_config
    assert settings["extra"] == "forbid"
    assert settings["frozen"]


# -- the algorithm's row -----------------------------------------------------------------------------------


def test_a_recipe_changes_columns_of_the_row() -> None:
    row = RlSection(
        algorithm="dapo", clip_low=0.1, clip_high=0.3, aggregation="token_mean", scale="none"
    ).row()
    assert (row.clip_low, row.clip_high, row.aggregation, row.scale) == (0.1, 0.3, "token_mean", "none")
    assert row.kl_in == "none"


@pytest.mark.parametrize(
    ("algorithm", "coefficient", "kl_in", "wanted"),
    [
        ("grpo", None, "loss", 0.04),  # the row's own
        ("grpo", 0.0, "none", 0.0),
        ("dapo", None, "none", 0.0),
        ("dapo", 0.1, "loss", 0.1),
    ],
)
def test_the_kl_term_by_its_coefficient(
    algorithm: str, coefficient: float | None, kl_in: str, wanted: float
) -> None:
    row = RlSection(algorithm=algorithm, kl_coefficient=coefficient).row()
    assert (row.kl_in, row.kl_coefficient) == (kl_in, wanted)


def test_a_resolved_recipe_holds_every_default() -> None:
    recipe = load_recipe(BASE)
    again = Recipe.model_validate(recipe.model_dump(mode="json"))
    assert again == recipe
    assert again.rollout.max_turns == 8
