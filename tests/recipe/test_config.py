"""Recipes: closed, explained, and every key means something."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel, create_model

import stepladder
from stepladder.errors import ConfigError
from stepladder.recipe.config import Recipe, bundled_recipes, load_recipe, parse_recipe
from stepladder.recipe.moved import MOVED, moved
from stepladder.recipe.rl import COLUMNS, RlSection
from stepladder.run.toml import to_toml

ROOT = Path(stepladder.__file__).parent
BASE: dict[str, Any] = {"environment": {"name": "hidden_digit"}, "rl": {}}


def refused(data: dict[str, Any] | Path, *overrides: str) -> str:
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
        (["rl.algorithm=reinforce", "rl.clip.high=0.2"], ["no ratio to clip", "algorithm = 'grpo'"]),
        (["rl.algorithm=cispo", "rl.clip.absolute=true"], ["largest weight", "clip.high = 5.0"]),
        (["rl.algorithm=cispo", "rl.clip.absolute=true", "rl.clip.high=0.9"], ["0.9", "clip.high = 5.0"]),
        (["rl.algorithm=reinforce", "rl.credit.scale=none"], ["does not divide", "scale='none'"]),
        (["rl.group_size=0"], ["rl.group_size", "greater than or equal to 1", "got 0"]),
        (["rl.group_size=1"], ["compares the episodes of a group", "group_size = 8"]),
        (["rl.algorithm=dapo", "rl.group_size=1"], ["group_size"]),
        (["rl.credit.gamma=0.9"], ["gamma=0.9", "'grpo'", "algorithm = 'ppo'"]),
        (["rl.algorithm=ppo", "rl.credit.advantage=m:f", "rl.credit.gamma=0.9"], ["gamma=0.9"]),
        (["rl.credit.turn_gamma=0.5"], ["turn_gamma=0.5", "credit.kind='outcome'", "credit.kind = 'turns'"]),
        (
            ["rl.algorithm=ppo", "rl.credit.kind=turns", "rl.credit.turn_gamma=0.5"],
            ["turn_gamma=0.5", "use gamma"],
        ),
        (
            ["rl.algorithm=reinforce", "rl.off_policy.correction=behaviour"],
            ["correction='behaviour'", "token_cap"],
        ),
        (["rl.learning_rate=inf"], ["rl.learning_rate", "finite", "inf"]),
        (["rl.kl.coefficient=inf"], ["rl.kl.coefficient", "finite"]),
        (["rl.algorithm=GRPO"], ["'GRPO'", "Did you mean 'grpo'?"]),
        (["rl.kl.place=reward", "rl.kl.estimator=k3"], ["biased penalty", "take k1"]),
        (["rl.kl.estimator=k1"], ["no gradient on average", "take k2 or k3"]),
        (["rl.algorithm=dapo", "rl.kl.place=loss"], ["where a KL term stands", "rl.kl.coefficient = 0.01"]),
        (["rl.kl.target=6.0"], ["kl.target=6", "in the loss", "kl.place = 'reward'"]),
        (["rl.kl.coefficient=0", "rl.kl.reference_every=5"], ["reference_every=5", "has none here"]),
        (["rl.entropy.target=1.0", "rl.entropy.coefficient=0.1"], ["is fixed", "give one"]),
        (["rl.credit.kind=bilevel"], ["does not go with 'grpo'", "algorithm = 'ppo'"]),
        (["rl.algorithm=ppo", "rl.credit.kind=gigpo"], ["does not go with 'ppo'", "algorithm = 'grpo'"]),
        (["rl.credit.kind=turns", "rl.credit.normalise=domain"], ["scores of whole episodes", "'task'"]),
        (
            ["rl.algorithm=reinforce", "rl.group_size=1", "rl.credit.normalise=environment"],
            ["mean of a task's episodes", "group_size = 8", "leave normalise out"],
        ),
        (["rl.credit.baseline=0.5"], ["fixed number of 'reinforce'"]),
        (
            ["rl.credit.advantage=a:b", "rl.credit.kind=turns"],
            ["rl.credit.advantage = 'a:b' replaces", "leave those out"],
        ),
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
    data = {**BASE, "rl": {"clip": {"low": 0.3}, "stop_at_success": 0.9}, "sft": {"demonstrations": 3}}
    recipe = load_recipe(data, ["rl.clip.low=null", "sft=null"])
    assert recipe.rl is not None
    assert recipe.rl.clip.low is None
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
        found |= {name: of for kind in _models_in(field.annotation) for name, of in _sections(kind).items()}
    return found


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in _models_in(argument)]


def _keys(section: type[BaseModel]) -> set[str]:
    """The keys of a section without those that are tables of their own."""
    return {key for key, field in section.model_fields.items() if not _models_in(field.annotation)}


def _names_read(sources: Iterable[tuple[bool, str]]) -> set[str]:
    """The attributes that (is it of the recipe, source) read. In recipe/ a section's own methods count alone,
    not what is refused, for a key that is only refused is a key that is ignored."""
    names: set[str] = set()
    for of_recipe, source in sources:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                own = isinstance(node.value, ast.Name) and node.value.id == "self"
                names |= {node.attr} if own or not of_recipe else set()
    return names


def _package() -> Iterator[tuple[bool, str]]:
    for file in ROOT.rglob("*.py"):
        yield file.parent.name == "recipe", file.read_text(encoding="utf-8")


READ = _names_read(_package()) | {key.split(".")[-1] for key in COLUMNS.values()}
"""What the package reads; the columns of the algorithm's row are read by a table."""


def test_the_walk_reaches_nested_tables() -> None:
    assert {"Recipe", "RlSection", "KlSection", "CriticSection", "LoraSection", "BonusSection"} <= set(
        _sections()
    )


def _ignored(section: type[BaseModel], read: set[str]) -> list[str]:
    return sorted(_keys(section) - read)


@pytest.mark.parametrize("section", sorted(_sections()))
def test_every_key_of_a_recipe_is_read_somewhere(section: str) -> None:
    """Nothing "will be ignored"."""
    assert not _ignored(_sections()[section], READ)


def test_a_key_that_is_only_refused_would_be_found() -> None:
    planted = create_model("Planted", used=(int, 0), own=(int, 0), idle=(int, 0))
    refusal = "class Planted:\n    refusals = ((lambda s: s.idle, 'no'),)\n    def f(self): return self.own"
    read = _names_read([(True, refusal), (False, "section.used"), (False, "section.idle = 1")])
    assert _ignored(planted, read) == ["idle"]


@pytest.mark.parametrize("section", sorted(_sections()))
def test_no_section_has_more_than_twenty_keys(section: str) -> None:
    assert len(_keys(_sections()[section])) <= 20


def test_a_section_of_21_keys_would_be_found() -> None:
    planted = create_model("Planted", **{f"key_{i}": (int, i) for i in range(21)}, table=(RlSection, None))
    assert len(_keys(planted)) == 21


# -- old keys ----------------------------------------------------------------------------------------------


def _as_sections(key: str, value: Any) -> dict[str, Any]:
    for part in reversed(key.split(".")):
        value = {part: value}
    assert isinstance(value, dict)
    return value


@pytest.mark.parametrize("old", MOVED)
def test_an_old_key_names_its_new_place(old: str, tmp_path: Path) -> None:
    """As a dictionary, as TOML and on the command line; and the new place is there."""
    wanted = f"{old} is now {MOVED[old]}"
    assert refused(_as_sections(old, 1)) == wanted
    file = tmp_path / "r.toml"
    file.write_text(to_toml(_as_sections(old, 1)))
    assert refused(file) == wanted
    assert refused(BASE, f"{old}=1") == wanted
    with pytest.raises(ConfigError, match=re.escape(wanted)):
        parse_recipe(_as_sections(old, 1))
    *tables, key = MOVED[old].split(".")
    section: Any = Recipe
    for table in tables:
        (section,) = _models_in(section.model_fields[table].annotation)
    assert key in section.model_fields


def test_what_is_no_old_key_is_not_taken_for_one() -> None:
    assert moved("rl.steps", 3) is None
    assert moved("rl.credit", {"kind": "turns"}) is None
    recipe = load_recipe({**BASE, "rl": {"credit": {"kind": "turns"}}}, ["rl.credit=null"])
    assert recipe.rl is not None
    assert recipe.rl.credit.kind == "outcome"
    assert "rl.clip_low is now" in refused(BASE, "rl.clip_low=null")


def test_all_old_keys_are_named_at_once() -> None:
    message = refused({**BASE, "rl": {"clip_low": 0.1, "credit": "turns", "kl": {"coefficient": 0.1}}})
    assert message.splitlines() == ["rl.clip_low is now rl.clip.low", "rl.credit is now rl.credit.kind"]


@pytest.mark.parametrize("section", sorted(_sections()))
def test_sections_are_closed_and_frozen(section: str) -> None:
    settings = _sections()[section].model_config
    assert settings["extra"] == "forbid"
    assert settings["frozen"]


# -- the algorithm's row -----------------------------------------------------------------------------------


def test_a_recipe_changes_columns_of_the_row() -> None:
    row = RlSection(
        algorithm="dapo", clip={"low": 0.1, "high": 0.3}, aggregation="token_mean", credit={"scale": "none"}
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
    row = RlSection(algorithm=algorithm, kl={"coefficient": coefficient}).row()
    assert (row.kl_in, row.kl_coefficient) == (kl_in, wanted)


def test_a_resolved_recipe_holds_every_default() -> None:
    recipe = load_recipe(BASE)
    again = Recipe.model_validate(recipe.model_dump(mode="json"))
    assert again == recipe
    assert again.rollout.max_turns == 8
