"""Write docs/recipes.md from the pydantic models of stepladder/recipe: python docs/make_reference.py"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from stepladder.algorithms import ALGORITHMS
from stepladder.recipe.config import Recipe, bundled_recipes, load_recipe

PAGE = Path(__file__).parent / "recipes.md"
_BOUNDS = (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"))
_NAMES = {int: "integer", float: "number", str: "text", bool: "true or false"}

INTRO = """\
# Recipes

<!-- Written by docs/make_reference.py from stepladder/recipe; edit the descriptions there. -->

A recipe is one TOML file. At least one rung (`[sft]`, `[rejection_sampling]`, `[preference]`,
`[reward_model]`, `[process_reward_model]`, `[distillation]`, `[rl]`) is needed, and an `[environment]`
unless all training is on files; everything else has the default that the tables show. A key that is not
listed is refused with the nearest one that is; a value of the wrong kind and two settings that contradict
each other are refused too, before a model is loaded.

```toml
[environment]
name = "calculator"

[sft]
demonstrations = 42

[rl]
steps = 30
```

On the command line, `section.key=value` changes one key. Values are TOML; what is no TOML is taken as text.
`null` unsets a key or a whole section:

```bash
stepladder train calculator rl.steps=60 run.name=longer
stepladder train calculator model.lora.rank=8 model.train_embeddings=null
stepladder train calculator rl=null evaluation.few_shot=0
```

In Python a recipe is the same thing as a dictionary, or a name or file with overrides:

```python
from stepladder import load_recipe

recipe = load_recipe("calculator", ["rl.steps=60"])
assert recipe.rl.steps == 60
```

The run folder's `recipe.toml` holds the recipe with every default written out.
"""


def page() -> str:
    """The text of docs/recipes.md."""
    blocks = [INTRO, _bundled()]
    blocks += [_section(name, model, required) for name, model, required in _sections()]
    blocks.append(_algorithms())
    return "\n".join(blocks)


def _sections(
    prefix: str = "", model: type[BaseModel] = Recipe, required: bool = True
) -> Iterator[tuple[str, type[BaseModel], bool]]:
    """(dotted name, model, whether it must be given), each followed by its own sections."""
    yield prefix.removesuffix("."), model, required
    for key, field in model.model_fields.items():
        inner = _model_of(field.annotation)
        if inner is not None:
            yield from _sections(f"{prefix}{key}.", inner, field.is_required())


def _model_of(annotation: Any) -> type[BaseModel] | None:
    options = [annotation, *get_args(annotation)]
    return next((o for o in options if isinstance(o, type) and issubclass(o, BaseModel)), None)


def _section(name: str, model: type[BaseModel], required: bool) -> str:
    fields = {key: field for key, field in model.model_fields.items() if not _model_of(field.annotation)}
    own = sorted(fields, key=lambda key: key not in model.__annotations__)  # then what its bases have
    rows = [_row(key, fields[key]) for key in own]
    title = f"## [{name}]" if name else "## Above all sections"
    about = " ".join((model.__doc__ or "").split()) if name else "One key stands before the first section."
    need = " Required." if name and required else ""
    head = "| key | type | default | what it does |\n|---|---|---|---|"
    return "\n".join([title, "", about + need, "", head, *rows, ""])


def _row(key: str, field: FieldInfo) -> str:
    if not field.description:
        raise ValueError(f"{key} has no description; add one in stepladder/recipe")
    cells = [f"`{key}`", _type(field.annotation, field), _default(field), field.description]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _type(annotation: Any, field: FieldInfo) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ", ".join(f'`"{value}"`' for value in arguments)
    if origin in (Union, UnionType):
        return " or ".join(_type(a, field) for a in arguments if a is not NoneType)
    if origin is tuple and arguments[0] not in _NAMES:
        return "list of tables"
    if origin is tuple:
        return f"list of {_NAMES[arguments[0]]}"
    if origin is dict:
        return "table"
    found = [(sign, getattr(m, name)) for m in field.metadata for name, sign in _BOUNDS if hasattr(m, name)]
    bounds = ", ".join(f"{sign} {value:g}" for sign, value in found)
    return f"{_NAMES[annotation]} {bounds}".rstrip()


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, (dict, tuple)):
        return "empty" if not value else f"`{value}`"
    return f"`{json.dumps(value)}`" if isinstance(value, str) else f"`{value}`"


def _bundled() -> str:
    rows = [f"| `{name}` | {load_recipe(name).description} |" for name in bundled_recipes()]
    return "\n".join(["## Bundled recipes", "", "| name | what it does |", "|---|---|", *rows, ""])


def _algorithms() -> str:
    """What `rl.algorithm` can name in this loop, found by asking the recipe itself."""
    rows = []
    for name, row in ALGORITHMS.items():
        cells = [f"`{name}`", row.advantage, row.ratio_level, row.aggregation, _kl(row), _taken(name)]
        rows.append("| " + " | ".join(cells) + " |")
    head = (
        "| `rl.algorithm` | advantage | ratio | aggregation | KL | in a recipe |\n|---|---|---|---|---|---|"
    )
    about = (
        "A row of [algorithms.py](../stepladder/algorithms.py), each with a page under\n"
        "[algorithms](algorithms/README.md). The recipe's `aggregation`, `credit.scale`, `clip.low`,\n"
        "`clip.high` and `kl.coefficient` replace the row's own. `reinforce` has no clip and no scale."
    )
    return "\n".join(["## Algorithms", "", about, "", head, *rows, ""])


def _kl(row: Any) -> str:
    return "none" if row.kl_in == "none" else f"{row.kl_coefficient:g} in the {row.kl_in}"


def _taken(name: str) -> str:
    from stepladder.errors import ConfigError

    def works(**more: Any) -> bool:
        try:
            load_recipe({"environment": {"name": "calculator"}, "rl": {"algorithm": name, **more}})
        except ConfigError:
            return False
        return True

    if works():
        return "yes"
    return "with `kl.coefficient = 0`" if works(kl={"coefficient": 0.0}) else "not yet"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
