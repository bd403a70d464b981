"""Small posteriors and regressions on which the optimizer and the loop are run."""

import torch
from torch import Tensor

from torchngvi import SRVN, VN, GeneralizedLinear
from torchngvi.interfaces import Posterior
from torchngvi.registry import POSTERIORS, partners

DIM, ROWS = 3, 20
METHODS = {"VN": VN, "SRVN": SRVN}
PAIRS = [(m, p) for m in METHODS for p in partners(m.lower())]
BATCHES = [(), (3,)]  # (3,) is DIM, where a wrong broadcast goes unnoticed by shape


def make_posterior(
    name: str, batch: tuple[int, ...] = (), *, seed: int = 0, dtype: torch.dtype = torch.float64
) -> Posterior:
    """A posterior whose mean and root have no zeros where they need none."""
    generator = torch.Generator().manual_seed(seed)
    mean = 0.3 * torch.randn(*batch, DIM, generator=generator, dtype=torch.float64)
    factor = 0.2 * torch.randn(*batch, DIM, DIM, generator=generator, dtype=torch.float64).tril(-1)
    factor = factor + torch.diag_embed(0.5 + 0.5 * torch.rand(*batch, DIM, generator=generator, dtype=torch.float64))
    return POSTERIORS[name](DIM, batch, mean=mean.to(dtype), scale=factor.to(dtype))


def make_model(
    batch: tuple[int, ...] = (),
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    kind: type[GeneralizedLinear] = GeneralizedLinear,
    temperature: float = 1.0,
) -> GeneralizedLinear:
    """Logistic regression, one data set a batch member."""
    generator = torch.Generator().manual_seed(100 + seed)
    X = torch.randn(*batch, ROWS, DIM, generator=generator, dtype=torch.float64)
    y = (X.sum(-1) + torch.randn(*batch, ROWS, generator=generator, dtype=torch.float64) > 0).double()
    return kind(X.to(dtype), y.to(dtype), prior_precision=0.5, temperature=temperature)


class CountedModel(GeneralizedLinear):
    """Counts its evaluations."""

    calls = 0

    def expected_energy(self, frame):
        self.calls += 1
        return super().expected_energy(frame)


def coordinates(q: Posterior) -> list[Tensor]:
    """A copy of what q stores."""
    return [tensor.detach().clone() for tensor in q.coordinates]


def distance(left: Posterior | list[Tensor], right: Posterior | list[Tensor]) -> float:
    """The largest difference of coordinates, relative to their largest entry or 1; NaN where either is."""
    left, right = (coordinates(q) if isinstance(q, Posterior) else q for q in (left, right))
    differences = [(a - b).abs().max() / b.abs().max().clamp_min(1.0) for a, b in zip(left, right, strict=True)]
    return float(torch.stack([d.cpu() for d in differences]).max())


def same_bits(left: Posterior | list[Tensor], right: Posterior | list[Tensor]) -> bool:
    """Whether coordinates are equal to the last bit."""
    left, right = (coordinates(q) if isinstance(q, Posterior) else q for q in (left, right))
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))
