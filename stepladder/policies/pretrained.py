"""Finding and loading pretrained models: a folder, a bundled name, or a hub id."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

from stepladder.errors import ConfigError, ModelNotFound, nearest
from stepladder.policies.bundled import BUNDLED, ensure_bundled, say
from stepladder.policies.dropout import zero_config_dropout, zero_dropout
from stepladder.policies.merging import merge
from stepladder.policies.quiet import no_progress_bars

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

DType: TypeAlias = Literal["auto", "float32", "bfloat16"]
HUB_TIMEOUT = 5.0  # seconds for the first answer of a hub; without one, say so instead of hanging
_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?$")
# What a model needs, and nothing that could run code: no pickles, no Python files.
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]


def resolve_model(name: str) -> Path:
    """The local folder of a model: a bundled name, a folder, or a hub id (cached, else downloaded).

    A cached hub model is used without asking the network. Raises ModelNotFound with one sentence that
    says what to do; it never waits more than a few seconds for a hub that does not answer.
    """
    if name in BUNDLED:
        return ensure_bundled(name)
    folder = Path(name).expanduser()
    if folder.is_dir():
        return _check_folder(folder)
    if folder.exists():
        raise ModelNotFound(f"{name!r} is a file; a model is a folder with config.json and *.safetensors.")
    if not _HUB_ID.match(name):
        raise ModelNotFound(f"there is no model folder {name!r}; {_what_works(name)}")
    return _cached_on_disk(name) or _download(name)


def load_model(
    name: str | Path,
    *,
    dtype: DType = "auto",
    device: str = "auto",
    attn_implementation: str | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """A model in eval mode with every dropout 0, and its tokenizer (with a pad token).

    Only safetensors are read, and no code that comes with a model is run. A folder that holds a PEFT
    adapter gives its base model with the adapter merged in.

    Raises ModelNotFound, or ConfigError when a setting does not fit the model or the machine.
    """
    import torch
    from transformers import AutoModelForCausalLM

    folder = resolve_model(str(name))
    chosen_device = pick_device(device)
    chosen_dtype = pick_dtype(dtype, chosen_device)
    tokenizer = tokenizer_in(folder)
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        model = _load_adapter(folder, dtype=dtype, device=device, attn_implementation=attn_implementation)
        return model, tokenizer
    config = load_config(folder)
    zero_config_dropout(config)
    options: dict[str, Any] = {"attn_implementation": attn_implementation} if attn_implementation else {}
    try:
        with no_progress_bars():
            model = AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype=chosen_dtype,
                trust_remote_code=False,
                use_safetensors=True,
                local_files_only=True,
                **options,
            )
    except OSError as error:
        raise ModelNotFound(f"the model in {folder} cannot be loaded: {error}") from error
    zero_dropout(model)
    model.to(torch.device(chosen_device))  # type: ignore[arg-type]
    model.eval()  # type: ignore[no-untyped-call]
    return model, tokenizer


def load_tokenizer(name: str | Path) -> PreTrainedTokenizerFast:
    """The tokenizer of a model, alone. Raises ModelNotFound."""
    return tokenizer_in(resolve_model(str(name)))


def pick_device(device: str = "auto") -> str:
    """`auto` takes cuda, then mps, then cpu. A named device is checked.

    Raises ConfigError when the device is unknown or not there.
    """
    import torch

    present: dict[str, Callable[[], bool]] = {
        "cuda": torch.cuda.is_available,
        "mps": torch.backends.mps.is_available,
        "cpu": lambda: True,
    }
    if device == "auto":
        return next(kind for kind, there in present.items() if there())
    kind = device.split(":")[0]
    if kind not in present:
        raise ConfigError(f"device must be auto, cpu, cuda, cuda:N or mps; got {device!r}.")
    if not present[kind]():
        raise ConfigError(f"device {device!r} is not available on this machine; use device = 'auto'.")
    return device


def pick_dtype(dtype: DType = "auto", device: str = "cpu") -> torch.dtype:
    """`auto` takes bfloat16 where the hardware computes in it (recent x86 CPUs, CUDA GPUs), else float32.

    Raises ConfigError for any other name.
    """
    import torch

    if dtype == "auto":
        if device.startswith("cuda"):
            fast = torch.cuda.is_bf16_supported(including_emulation=False)
        else:
            fast = device == "cpu" and cpu_has_bf16()
        return torch.bfloat16 if fast else torch.float32
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if dtype not in known:
        raise ConfigError(f"dtype must be auto, float32 or bfloat16; got {dtype!r}.{nearest(dtype, known)}")
    return known[dtype]


def cpu_has_bf16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether an x86 CPU multiplies in bfloat16; False where /proc/cpuinfo does not exist or say so."""
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    flags = next((line.split() for line in text.splitlines() if line.startswith("flags")), [])
    return "avx512_bf16" in flags or "amx_bf16" in flags


def load_config(folder: Path) -> PretrainedConfig:
    """The configuration in `folder`. Raises ConfigError where it is broken, or asks for foreign code."""
    from transformers import AutoConfig

    raw = _read_json(folder / "config.json")
    # Such a key makes transformers fetch a kernel from a hub and run it, whatever trust_remote_code says.
    for key in ("attn_implementation", "_attn_implementation", "_attn_implementation_internal"):
        if "/" in str(raw.get(key, "")):
            raise ConfigError(
                f"{folder}/config.json asks for foreign code ({key} = {raw[key]!r}); remove it."
            )
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(
            folder, trust_remote_code=False, local_files_only=True
        )
    except (ValueError, OSError) as error:
        raise ConfigError(f"the configuration of {folder} cannot be used: {error}") from error
    return config


def tokenizer_in(folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer in `folder`, with a pad token. Raises ModelNotFound where it cannot be loaded."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except (ValueError, OSError) as error:
        raise ModelNotFound(f"the tokenizer in {folder} cannot be loaded: {error}") from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return cast("PreTrainedTokenizerFast", tokenizer)


def _load_adapter(folder: Path, **options: Any) -> PreTrainedModel:
    from peft import PeftModel

    if not (folder / "adapter_model.safetensors").is_file():
        raise ModelNotFound(f"{folder} holds an adapter without adapter_model.safetensors; export it again.")
    base_name = _read_json(folder / "adapter_config.json").get("base_model_name_or_path")
    if not base_name:
        raise ModelNotFound(f"{folder}/adapter_config.json does not name its base model.")
    base, _ = load_model(base_name, **options)
    merged = merge(PeftModel.from_pretrained(base, str(folder)))
    zero_dropout(merged)
    merged.eval()  # type: ignore[no-untyped-call]
    return merged


def _check_folder(folder: Path) -> Path:
    if not any((folder / name).is_file() for name in ("config.json", "adapter_config.json")):
        inside = sorted(path.name for path in folder.iterdir())[:6]
        raise ModelNotFound(
            f"the folder {folder} holds no config.json (it holds {', '.join(inside) or 'nothing'}); "
            "name the folder that `save_pretrained` or a run wrote, such as runs/NAME/final."
        )
    return folder


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise ModelNotFound(f"{path} cannot be read: {error}") from error


def _cached_on_disk(name: str) -> Path | None:
    """The newest complete snapshot in the hub's local cache."""
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(name, "config.json")
    if not isinstance(config, str):
        return None
    snapshot = Path(config).parent
    index = snapshot / "model.safetensors.index.json"
    if index.is_file():
        shards = set(_read_json(index)["weight_map"].values())
        return snapshot if all((snapshot / shard).is_file() for shard in shards) else None
    return snapshot if any(snapshot.glob("*.safetensors")) else None


def _download(name: str) -> Path:
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import RepositoryNotFoundError

    if constants.HF_HUB_OFFLINE or os.environ.get("HF_HUB_OFFLINE") in ("1", "true"):
        raise ModelNotFound(
            f"{name!r} is not in the hub's cache and HF_HUB_OFFLINE is on; {_what_works(name)}"
        )
    try:
        HfApi().model_info(name, timeout=HUB_TIMEOUT)
        say(f"{name}: downloading from the hub (once) ...")
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES, etag_timeout=HUB_TIMEOUT))
    except RepositoryNotFoundError as error:
        raise ModelNotFound(f"no hub model is called {name!r}; {_what_works(name)}") from error
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        raise ModelNotFound(f"{name!r} could not be fetched ({reason}); {_what_works(name)}") from error


def _what_works(name: str) -> str:
    hint = nearest(name.split("/")[-1].lower(), BUNDLED)
    return f"use a local folder, or a bundled model ({', '.join(BUNDLED)}), which needs no hub.{hint}"
