"""An adapter that is small against the rounding of its weights acts where it is merged."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

from stepladder.engines.local.packing import effective_weight
from stepladder.objectives.rounding import changed
from stepladder.policies.merging import merge
from stepladder.policies.tiny import tiny_model


def survives(before: Tensor, after: Tensor, change: Tensor) -> float:
    """The share of a change that is there after rounding: the regression of what moved on what should."""
    moved = after.double() - before.double()
    return float((moved * change).sum() / (change.double() ** 2).sum())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1e-6, 1e-5, 1e-3])
def test_a_change_keeps_its_mean(dtype: torch.dtype, size: float) -> None:
    """Weights about .06 lie 2^-12 = 2.4e-4 apart in bfloat16. Of 400,000 a hundredth move by a whole spacing
    where the change is a hundredth of it, 4,000 ± 63: 2 %."""
    g = torch.Generator().manual_seed(0)
    weight = (0.06 * torch.randn(400_000, generator=g)).to(dtype)
    change = torch.full((400_000,), size)
    assert torch.equal(changed(weight, torch.zeros_like(change)), weight)
    assert survives(weight, changed(weight, change), change) == pytest.approx(1.0, abs=0.15)
    if dtype is torch.bfloat16 and size < 1e-4:
        assert survives(weight, weight + change.to(dtype), change) < 0.7  # what adding it there would leave


def test_wider_weights_are_added_to_as_they_are() -> None:
    weight = torch.tensor([1.0, 2.0], dtype=torch.float64)
    assert changed(weight, torch.tensor([1e-12, 0.0], dtype=torch.float64)).tolist() == [1 + 1e-12, 2.0]


def test_a_small_adapter_acts_in_the_engine_and_in_a_merged_model() -> None:
    torch.manual_seed(0)
    base = tiny_model(64, layers=2, hidden=128).to(torch.bfloat16)
    plain = copy.deepcopy(base)
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"])).eval()
    layers = {n: m for n, m in model.named_modules() if hasattr(m, "lora_A")}
    for layer in layers.values():
        layer.lora_B["default"].weight.data = 1e-5 * torch.sign(
            torch.randn_like(layer.lora_B["default"].weight)
        )
    held = {name: effective_weight(layer)[0] for name, layer in layers.items()}
    merged = dict(merge(copy.deepcopy(model)).named_modules())
    start = dict(plain.named_modules())
    moved, wanted = [], []
    for name, layer in layers.items():
        short = name.removeprefix("base_model.model.")
        assert torch.equal(merged[short].weight, held[name])
        assert torch.equal(layer.base_layer.weight, start[short].weight)  # the engine writes to none
        moved.append((held[name].double() - start[short].weight.detach().double()).flatten())
        wanted.append(layer.get_delta_weight("default").detach().double().flatten())
    change = torch.cat(wanted)
    assert float((torch.cat(moved) * change).sum() / (change**2).sum()) == pytest.approx(1.0, abs=0.2)
