"""What all tests share: no hub, one torch thread, shapes and types checked on every call, tiny models."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from jaxtyping import install_import_hook

# Shapes and types of these packages are checked on every call; "tower": an int is a float, as for mypy.
CHECKED = ("stepladder.objectives", "stepladder.policies", "stepladder.training")
install_import_hook(CHECKED, "tower.checked")

from collections.abc import Callable, Iterator  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import pytest  # noqa: E402
import torch  # noqa: E402

from stepladder.policies.policy import Policy  # noqa: E402

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _one_setting_of_torch() -> Iterator[None]:
    """A run sets threads and determinism for its process; here many runs share one."""
    yield
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(False)
