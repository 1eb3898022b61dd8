"""Random batches for the property tests: shapes, masks and numbers from one Hypothesis draw."""

import dataclasses
from collections.abc import Callable

import torch
from hypothesis import strategies as st
from torch import Tensor

NAN = float("nan")


@dataclasses.dataclass(frozen=True)
class Batch:
    """Columns of a step; `group`, `trajectory`, `rewards` are per row, everything else per token."""

    lp: Tensor
    proximal: Tensor
    behaviour: Tensor
    reference: Tensor
    old_values: Tensor
    returns: Tensor
    labels: Tensor
    mask: Tensor
    rewards: Tensor
    group: Tensor
    trajectory: Tensor

    def map(self, change: Callable[[Tensor], Tensor], *names: str) -> "Batch":
        changed = {name: change(getattr(self, name)) for name in names or FIELDS}
        return dataclasses.replace(self, **changed)

    def rows(self, index: Tensor | slice) -> "Batch":
        return self.map(lambda x: x[index])

    def poisoned(self, value: float) -> "Batch":
        """The same batch with `value` wherever the mask is False."""
        spoil = lambda x: torch.where(self.mask, x, torch.full_like(x, value))  # noqa: E731
        return self.map(spoil, *PER_TOKEN)

    def padded(self, left: int, right: int) -> "Batch":
        """Extra columns on either side, filled with NaN and masked out."""
        height = len(self.mask)

        def widen(x: Tensor) -> Tensor:
            fill = x.new_zeros if x.dtype == torch.bool else lambda shape: x.new_full(shape, NAN)
            return torch.cat([fill((height, left)), x, fill((height, right))], dim=1)

        return self.map(widen, *PER_TOKEN, "mask")


PER_TOKEN = ("lp", "proximal", "behaviour", "reference", "old_values", "returns", "labels")
FIELDS = tuple(field.name for field in dataclasses.fields(Batch))


def make(seed: int, groups: int, size: int, width: int, *, drift: float = 0.25) -> Batch:
    """`groups` groups of `size` rows with at most `width` tokens; row 0 has at least one trained token."""
    g = torch.Generator().manual_seed(seed)
    shape = (groups * size, width)
    normal = lambda *s: torch.randn(*s, generator=g, dtype=torch.float64)  # noqa: E731
    lp = -normal(*shape).abs() - 0.05
    mask = torch.rand(shape, generator=g) < 0.7
    mask[0, 0] = True
    return Batch(
        lp=lp,
        proximal=lp + drift * normal(*shape),
        behaviour=lp + drift * normal(*shape),
        reference=lp + drift * normal(*shape),
        old_values=normal(*shape),
        returns=normal(*shape),
        labels=torch.rand(shape, generator=g, dtype=torch.float64),
        mask=mask,
        rewards=normal(groups * size),
        group=torch.arange(groups).repeat_interleave(size),
        trajectory=torch.arange(groups * size),
    )


batches = st.builds(
    make,
    seed=st.integers(0, 2**31),
    groups=st.integers(1, 2),
    size=st.integers(2, 3),
    width=st.integers(1, 5),
)
