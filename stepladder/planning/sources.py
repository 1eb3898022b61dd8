"""Where a model's sizes are read: the config.json of a folder, a run, a bundled, a hub model: no weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stepladder.errors import ModelNotFound
from stepladder.planning.shape import Shape, shape_of
from stepladder.policies.bundled import BUNDLED
from stepladder.policies.pretrained import HUB_TIMEOUT, resolve_model

TINY = {"hidden": 128, "layers": 3, "heads": 4, "kv_heads": 2, "intermediate": 352, "max_positions": 512}


def model_shape(name: str, options: Mapping[str, Any] | None = None) -> Shape:
    """The shape of a model by the name that a recipe gives it. Raises ModelNotFound or ConfigError."""
    if name == "tiny":
        return _tiny(options or {})
    return shape_of(_config(name))


def _config(name: str) -> dict[str, Any]:
    folder = Path(name).expanduser()
    if (folder / "recipe.toml").is_file():  # a run: its trained model
        folder = folder / "final"
    if folder.is_dir() or name in BUNDLED:
        if name in BUNDLED:
            folder = resolve_model(name)
        if (folder / "config.json").is_file():
            return _read(folder / "config.json")
        if (folder / "adapter_config.json").is_file():
            return _config(str(_read(folder / "adapter_config.json").get("base_model_name_or_path")))
        raise ModelNotFound(
            f"the folder {folder} holds no config.json; name one that `save_pretrained` wrote"
        )
    return _read(_from_hub(name))


def _from_hub(name: str) -> Path:
    """The hub's config.json alone, from the cache where it is there."""
    from huggingface_hub import HfApi, hf_hub_download, try_to_load_from_cache

    try:
        cached = try_to_load_from_cache(name, "config.json")
        if isinstance(cached, str):
            return Path(cached)
        HfApi().model_info(name, timeout=HUB_TIMEOUT)  # asked first: it does not try for half a minute
        return Path(hf_hub_download(name, "config.json", etag_timeout=HUB_TIMEOUT))
    except Exception as error:  # of the hub's client, of its network, of this disk
        raise ModelNotFound(
            f"there is no model {name!r} here, and its config.json could not be fetched "
            f"({type(error).__name__}); name a local folder, or a bundled model ({', '.join(BUNDLED)})"
        ) from error


def _read(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise ModelNotFound(f"{path} cannot be read: {error}") from error


def _tiny(options: Mapping[str, Any]) -> Shape:
    from stepladder.data.chat.tiny_tokenizer import tiny_tokenizer

    sizes = {**TINY, **{k: v for k, v in options.items() if k in TINY}}
    family = str(options.get("arch", "llama"))
    return Shape(
        family="gemma3_text" if family == "gemma3" else family,
        layers=sizes["layers"],
        hidden=sizes["hidden"],
        heads=sizes["heads"],
        kv_heads=sizes["heads"] if family == "gpt2" else sizes["kv_heads"],
        head_dim=sizes["hidden"] // sizes["heads"],
        intermediate=sizes["intermediate"],
        vocabulary=len(tiny_tokenizer(*options.get("symbols", ()))),
        tied=True,
        gated=family != "gpt2",
        positions=sizes["max_positions"] if family == "gpt2" else 0,
        head_norms=family in ("qwen3", "gemma3"),
        norms=4 if family == "gemma3" else 2,
    )
