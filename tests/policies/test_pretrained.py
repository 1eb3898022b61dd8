"""Finding and loading models; what cannot be found is one sentence, at once."""

import json
import os
import sys
import time
from pathlib import Path

import pytest
import torch

from stepladder.errors import ConfigError, ModelNotFound
from stepladder.policies import pretrained
from stepladder.policies.export import export_model
from stepladder.policies.pretrained import (
    cpu_has_bf16,
    load_model,
    pick_device,
    pick_dtype,
    resolve_model,
    zero_dropout,
)
from stepladder.policies.tiny import tiny_model

sys.path.insert(0, str(Path(__file__).parent))
from policy_helpers import word_tokenizer


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty hub cache, and a hub address on this machine where nobody listens."""
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


@pytest.mark.usefixtures("no_hub")
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("smollm2-135m-instuct", "Did you mean 'smollm2-135m-instruct'"),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "Did you mean 'smollm2-135m-instruct'"),
        ("./no/such/folder", "there is no model folder './no/such/folder'"),
        ("someone/some-model", "use a local folder, or a bundled model"),
    ],
)
def test_a_missing_model_is_one_sentence_at_once(name: str, words: str) -> None:
    start = time.monotonic()
    with pytest.raises(ModelNotFound, match=words) as caught:
        resolve_model(name)
    assert "\n" not in str(caught.value)
    assert time.monotonic() - start < 10


@pytest.mark.usefixtures("no_hub")
def test_offline_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelNotFound, match="HF_HUB_OFFLINE is on"):
        resolve_model("someone/some-model")


def test_a_file_or_an_empty_folder_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_text("")
    with pytest.raises(ModelNotFound, match="is a file"):
        resolve_model(str(tmp_path / "x.gguf"))
    with pytest.raises(ModelNotFound, match=r"holds no config.json \(it holds x.gguf\)"):
        resolve_model(str(tmp_path))


def test_a_cached_hub_model_needs_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "models--a--b" / "snapshots" / "rev"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (snapshot / "model.safetensors").write_text("")
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: str(snapshot / "config.json"))
    monkeypatch.setattr(pretrained, "_download", lambda name: pytest.fail("asked the hub"))
    assert resolve_model("a/b") == snapshot


def test_a_half_cached_hub_model_is_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "one.safetensors").write_text("")
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: str(tmp_path / "config.json"))
    monkeypatch.setattr(pretrained, "_download", lambda name: Path("fetched"))
    assert resolve_model("a/b") == Path("fetched")
    (tmp_path / "two.safetensors").write_text("")
    assert resolve_model("a/b") == tmp_path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return export_model(tiny_model(32, layers=2, arch="gpt2"), word_tokenizer(), tmp_path / "m")


def test_load_gives_a_deterministic_model_in_eval_mode(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config.update(resid_pdrop=0.5, attn_pdrop=0.5, embd_pdrop=0.5, summary_first_dropout=0.5)
    (folder / "config.json").write_text(json.dumps(config))
    model, tokenizer = load_model(str(folder), dtype="float32", device="cpu")
    assert not model.training
    assert tokenizer.pad_token == tokenizer.eos_token
    ids = torch.tensor([[4, 5, 6]])
    expected = model(ids).logits
    model.train()  # with dropout left in, train mode would change the numbers
    assert torch.equal(model(ids).logits, expected)
    assert model.config.resid_pdrop == model.config.attn_pdrop == 0.0


def test_zero_dropout_reaches_modules_and_attributes() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.3), torch.nn.Dropout1d(0.2))
    model[0].attention_dropout = 0.1
    zero_dropout(model)
    assert (model[0].attention_dropout, model[1].p, model[2].p) == (0.0, 0.0, 0.0)


def test_dtype_is_taken(folder: Path) -> None:
    assert load_model(str(folder), dtype="bfloat16", device="cpu")[0].dtype == torch.bfloat16


def test_pickled_weights_are_not_read(folder: Path, tmp_path: Path) -> None:
    """Fault 125: a folder whose only weights are a pickle is refused, and the pickle not opened."""
    touched = tmp_path / "pwned"

    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.system, (f"touch {touched}",)

    (folder / "model.safetensors").unlink()
    import pickle

    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(ModelNotFound, match="cannot be loaded"):
        load_model(str(folder), dtype="float32", device="cpu")
    assert not touched.exists()


def test_code_that_comes_with_a_model_is_not_run(folder: Path, tmp_path: Path) -> None:
    touched = tmp_path / "pwned"
    (folder / "modeling_x.py").write_text(f"open({str(touched)!r}, 'w')\n")
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "x",
        "auto_map": {"AutoConfig": "modeling_x.X", "AutoModelForCausalLM": "modeling_x.Y"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises((ConfigError, ModelNotFound)):
        load_model(str(folder), dtype="float32", device="cpu")
    assert not touched.exists()


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation_internal"])
def test_a_kernel_from_elsewhere_is_refused(folder: Path, key: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    config[key] = "someone/evil-kernel"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="foreign code"):
        load_model(str(folder), device="cpu")


def test_device_and_dtype_names_are_checked() -> None:
    assert pick_device("cpu") == "cpu"
    with pytest.raises(ConfigError, match="auto, cpu, cuda"):
        pick_device("gpu")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="not available on this machine"):
            pick_device("cuda:1")
    with pytest.raises(ConfigError, match="Did you mean 'float32'"):
        pick_dtype("float23")
    assert pick_dtype("float32") == torch.float32


@pytest.mark.parametrize(
    ("text", "expected"),
    [("flags\t: fpu avx512_bf16 sse", True), ("flags : amx_bf16", True), ("flags : fpu", False), ("", False)],
)
def test_bf16_is_read_from_the_cpu_flags(tmp_path: Path, text: str, expected: bool) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor : 0\n{text}\n")
    assert cpu_has_bf16(tmp_path / "cpuinfo") is expected


def test_no_cpuinfo_means_no_bf16(tmp_path: Path) -> None:
    assert cpu_has_bf16(tmp_path / "missing") is False
