"""What the documentation says is what the code does: snippets run, commands parse, names and links exist."""

import importlib.util
import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
import typer.main

import stepladder
from stepladder.cli import app
from stepladder.deadlines import PROGRAMMING_ERRORS
from stepladder.environments.environment import load_world
from stepladder.recipe.config import bundled_recipes, eval_recipe, load_recipe, rung_sections
from stepladder.run.progress import Display

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINKED = [*PAGES, *sorted((ROOT / "docs" / "algorithms").glob("*.md"))]
NEEDS_MODEL = "# needs the bundled model"
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path, language: str) -> list[tuple[int, str]]:
    """(line of its first line, text) of every fenced block of a language."""
    text = page.read_text(encoding="utf-8")
    return [
        (text.count("\n", 0, match.start(2)) + 1, match.group(2))
        for match in _FENCE.finditer(text)
        if match.group(1) == language
    ]


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def with_blocks(language: str) -> list[Path]:
    return [page for page in PAGES if blocks(page, language)]


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder with the repository's examples, as a reader has it; global settings are put back."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    threads, modules = torch.get_num_threads(), set(sys.modules)
    yield tmp_path
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)
    for name in set(sys.modules) - modules:
        if name.startswith("page_"):
            del sys.modules[name]


def run_page(page: Path, *, with_model: bool) -> int:
    """Run a page's snippets in one namespace, a module so that its classes can be imported again."""
    module = ModuleType(f"page_{page.stem}")
    module.__file__ = str(page)
    sys.modules[module.__name__] = module
    count = 0
    for line, code in blocks(page, "python"):
        if with_model or NEEDS_MODEL not in code:
            exec(compile("\n" * (line - 1) + code, str(page), "exec"), module.__dict__)
            count += 1
    return count


@pytest.mark.parametrize("page", with_blocks("python"), ids=name_of)
def test_snippets_run(page: Path, workplace: Path) -> None:
    run_page(page, with_model=False)


def with_the_model() -> list[object]:
    """Pages with snippets that need the real model; those that train it take minutes."""
    found = []
    for page in PAGES:
        marked = [code for _, code in blocks(page, "python") if NEEDS_MODEL in code]
        slow = [pytest.mark.slow] if any("train(" in code for code in marked) else []
        if marked:
            found.append(pytest.param(page, marks=slow, id=name_of(page)))
    return found


@pytest.mark.model
@pytest.mark.parametrize("page", with_the_model())
def test_snippets_run_with_the_model(page: Path, workplace: Path) -> None:
    assert run_page(page, with_model=True) == len(blocks(page, "python"))


# -- commands -------------------------------------------------------------------------------------------


def commands() -> list[tuple[str, list[str]]]:
    """(where, arguments) of every `stepladder ...` line of the bash blocks."""
    found = []
    for page in PAGES:
        for line, text in blocks(page, "bash"):
            for command in text.replace("\\\n", " ").splitlines():
                words = shlex.split(command.removeprefix("$ "), comments=True)
                if words[:1] == ["stepladder"]:
                    found.append((f"{name_of(page)}:{line}: {' '.join(words)}", words[1:]))
    return found


@pytest.mark.parametrize("arguments", [a for _, a in commands()], ids=[w for w, _ in commands()])
def test_commands_parse(arguments: list[str], workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    group = typer.main.get_command(app)
    name, *rest = arguments
    command = group.commands[name]  # type: ignore[attr-defined]
    context = command.make_context(name, list(rest))  # raises on an unknown option or a missing argument
    assert (command.get_help(context) or capsys.readouterr().out).strip()
    given = context.params
    overrides = given.get("overrides") or []
    if "recipe" in given:
        known = given["recipe"] in bundled_recipes() or Path(given["recipe"]).is_file()
        load_recipe(given["recipe"] if known else "calculator", overrides)  # a reader's own file: any recipe
    if name == "eval":
        eval_recipe({"environment": {"name": given["env"]}}, overrides)
    if given.get("env") and not given["env"].startswith("my_"):
        load_world(given["env"])


def test_every_command_is_on_the_page() -> None:
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    group = typer.main.get_command(app)
    for name, command in group.commands.items():  # type: ignore[attr-defined]
        assert f"\n## {name}\n" in page
        for parameter in command.params:
            option = max(parameter.opts, key=len)
            if option.startswith("--"):
                assert option in page, f"{name} {option}"


# -- pages that must follow the code ------------------------------------------------------------------------


def test_the_recipe_page_is_up_to_date() -> None:
    """Otherwise: python docs/make_reference.py"""
    spec = importlib.util.spec_from_file_location("make_reference", ROOT / "docs" / "make_reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8") == module.page()


def test_the_own_environment_is_shown_verbatim() -> None:
    example = (ROOT / "examples" / "own_environment.py").read_text(encoding="utf-8")
    shown = [code for _, code in blocks(ROOT / "docs" / "environments.md", "python")]
    assert example in shown


def test_the_loud_errors_are_named() -> None:
    page = (ROOT / "docs" / "environments.md").read_text(encoding="utf-8")
    assert all(f"`{error.__name__}`" in page for error in PROGRAMMING_ERRORS)


def documented(heading: str) -> set[str]:
    """The names in the first column of the tables under the headings that start so."""
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    sections = [part for part in re.split(r"^## ", text, flags=re.MULTILINE) if part.startswith(heading)]
    assert sections
    cells = [line.split("|")[1] for part in sections for line in part.splitlines() if line.startswith("| `")]
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def test_every_label_of_an_evaluation_is_on_the_page() -> None:
    (row,) = re.findall(r"^\| `rung` \|.*$", (ROOT / "docs" / "metrics.md").read_text(), flags=re.MULTILINE)
    climbed = {name for name, section in rung_sections().items() if section.trains_policy}
    assert set(re.findall(r"`([^`]+)`", row)) == {"rung", "raw", "few-shot", *climbed, "rl-STEP"}


def test_every_metric_is_on_the_page(workplace: Path) -> None:
    """A run with every part switched on writes exactly the documented names."""
    overrides = (
        "rl.steps=3 rl.tasks_per_step=4 rl.group_size=4 rl.evaluate_every=2 rl.updates_per_batch=2 "
        "rl.replay.weight=0.1 rl.kl.coefficient=0.01 "
        "sft.demonstrations=16 sft.batch_size=8 sft.epochs=1 sft.validation=4 "
        "rejection_sampling.tasks=4 rejection_sampling.samples=3 rejection_sampling.require=scored "
        "rejection_sampling.epochs=1 rejection_sampling.validation=1 "
        "evaluation.raw=4 evaluation.tasks=4 evaluation.few_shot=1 run.threads=1"
    )
    folder = stepladder.train(load_recipe("hidden_digit", overrides.split()), display=Display(quiet=True))

    def lines(name: str) -> list[dict[str, object]]:
        return [json.loads(line) for line in (folder / name).read_text().splitlines()]

    metrics = lines("metrics.jsonl")
    for phase in ("sft", "rejection_sampling", "rl"):
        found = {key for line in metrics if line["phase"] == phase for key in line} - {"step", "phase"}
        for kind in ("reward/NAME", "failed/BOUNDARY", "version_lag/LAG"):
            found = {kind if key.startswith(kind.partition("/")[0] + "/") else key for key in found}
        assert found == documented(f'phase "{phase}"')
    evaluations = lines("evaluations.jsonl")
    assert {key for line in evaluations for key in line} == documented("evaluations.jsonl")
    assert [line["rung"] for line in evaluations] == [
        "raw",
        "few-shot",
        "sft",
        "rejection_sampling",
        "rl-2",
        "rl",
    ]

    assert_folder_is_drawn(folder)


def test_metrics_that_depend_on_settings_are_on_the_page(workplace: Path) -> None:
    data = {
        "run": {"threads": 1},
        "model": {"name": "tiny", "options": {"symbols": ["?", "S", *"01234"], "hidden": 32, "layers": 1}},
        "environment": {"name": "mixed", "options": {"worlds": [{"name": "hidden_digit"}]}},
        "rollout": {"max_turns": 2, "max_tokens": 3, "max_context": 64},
        "rl": {
            "algorithm": "ppo",
            "steps": 2,
            "tasks_per_step": 2,
            "group_size": 4,
            "entropy": {"target": 1.0},
            "tasks": {"dynamic_sampling": True},
            "bonuses": [{"kind": "format", "pattern": "^[S0-4]$"}],
        },
        "evaluation": {"tasks": 1, "raw": 0},
    }
    folder = stepladder.train(load_recipe(data), display=Display(quiet=True))
    found = {key for line in (folder / "metrics.jsonl").read_text().splitlines() for key in json.loads(line)}
    named = {re.sub(r"^(reward|success)/.*", r"\1/NAME", key) for key in found} - {"step", "phase"}
    named = {re.sub(r"^failed/.*", "failed/BOUNDARY", key) for key in named}
    named = {re.sub(r"^version_lag/.*", "version_lag/LAG", key) for key in named}
    known = documented('phase "rl"') | documented("RL, only with a setting")
    assert named <= known
    assert documented("RL, only with a setting") <= named


def assert_folder_is_drawn(folder: Path) -> None:
    page = (ROOT / "docs" / "concepts.md").read_text(encoding="utf-8")  # and the folder is the one it draws
    drawn = re.search(r"^runs/NAME/\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert drawn is not None
    for child in folder.iterdir():
        assert child.name == ".lock" or f"  {child.name}" in drawn.group(1)


@pytest.mark.parametrize(
    ("phase", "world", "source"),
    [("reward_model", "reviews", "pairs"), ("process_reward_model", "step_sums", "solutions")],
)
def test_every_metric_of_a_reward_model_is_on_the_page(
    workplace: Path, phase: str, world: str, source: str
) -> None:
    data = {
        "model": {"name": "tiny", "dtype": "float32", "options": {"hidden": 32, "layers": 1}},
        "environment": {"name": world},
        phase: {source: 24, "epochs": 1, "validation": 8},
        "evaluation": {"raw": 0},
        "run": {"threads": 1},
    }
    folder = stepladder.train(load_recipe(data), display=Display(quiet=True))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert {key for line in lines for key in line} - {"step", "phase"} == documented(f'phase "{phase}"')
    assert "held out: accuracy" in (folder / "summary.txt").read_text()
    page = (ROOT / "docs" / "concepts.md").read_text(encoding="utf-8")
    assert f"{phase}/" in page


# -- links ------------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """GitHub's anchors of a page's headings."""
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", LINKED, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):  # the web is not asked
            continue
        file, _, anchor = target.partition("#")
        there = (page.parent / file).resolve() if file else page
        assert there.exists(), f"{page}: {target}"
        assert not anchor or anchor in anchors(there), f"{page}: {target}"


def test_the_index_lists_every_page() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    for page in PAGES[1:]:
        assert page.name == "index.md" or f"]({page.name})" in index


def test_the_architecture_names_only_what_is_there() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    named = re.findall(r"`((?:\w+/)*\w+\.py|(?:\w+/)+)`", prose)
    assert len(named) > 30
    places = (ROOT, ROOT / "stepladder", ROOT / "stepladder" / "rungs" / "rl")
    assert not [name for name in named if not any((place / name).exists() for place in places)]
    tree = re.findall(r"^ {0,2}([\w/ ]+?)(?:  |\(|$)", text.split("```")[1], flags=re.MULTILINE)
    parts = [f"{word}{end}" for line in tree for word in line.split() for end in ("", ".py")]
    inside = [ROOT / "stepladder" / where / part for part in parts for where in ("", "rungs")]
    found = {path.stem for path in inside if path.exists()}
    assert found == {word.strip("/") for line in tree for word in line.split()}
