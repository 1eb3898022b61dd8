"""What all tests share: no hub, one torch thread, shapes and types checked on every call, tiny models."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from jaxtyping import install_import_hook

# Shapes and types of these modules are checked on every call; "tower": an int is a float, as for mypy. The
# others stay unchecked: their tests hand them wrong types to see what a user would be told.
CHECKED = (
    "stepladder.objectives",
    "stepladder.policies.policy",
    "stepladder.policies.fast.attention",
    "stepladder.policies.heads",
    "stepladder.policies.optimizer",
    "stepladder.rungs.accumulate",
    "stepladder.rungs.supervised",
    "stepladder.rungs.fitting",
    "stepladder.rungs.rl.loop",
    "stepladder.rungs.rl.update",
    "stepladder.rungs.rl.credit",
    "stepladder.rungs.tasks",
    "stepladder.ladder",
)
install_import_hook(CHECKED, "tower.checked")

from collections.abc import Iterator  # noqa: E402
from pathlib import Path  # noqa: E402

import pytest  # noqa: E402
import torch  # noqa: E402
from spine import digit_recipe, tiny_policy  # noqa: E402

from stepladder.policies.policy import Policy  # noqa: E402
from stepladder.recipe.config import Recipe  # noqa: E402

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _one_setting_of_torch() -> Iterator[None]:
    """A run sets threads and determinism for its process; here many runs share one."""
    yield
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def policy() -> Policy:
    """A tiny random Llama with the tiny tokenizer, fp32."""
    return tiny_policy()


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    """hidden_digit on a tiny model, every rung, in about two seconds; its run folder is tmp_path/run."""
    return digit_recipe(tmp_path)


@pytest.fixture(scope="session")
def real_policy() -> Policy:
    """SmolLM2-135M-Instruct in fp32, for tests marked `model`, which must not change its weights."""
    from stepladder.policies.pretrained import load_model

    return Policy(*load_model("smollm2-135m-instruct", dtype="float32", device="cpu"))
