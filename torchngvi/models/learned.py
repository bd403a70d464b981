"""Likelihoods one parameter of which is learned with the rest: a residual sd, a scale of noise, a size of counts.

The parameter is a coordinate φ, the logarithm of its value.  Its prior is one of a standard deviation s: of the noise
itself, s = e^φ, or, for the size of negative binomial counts, of the gamma factor of mean 1 by which their rates vary,
s = e^{-φ/2}:

    log p(φ) = log p(s) + log s + log |d log s/dφ|.
"""

import math
from abc import ABC, abstractmethod
from typing import final

import torch
from torch import Tensor

from torchngvi.models.likelihoods import GaussianNoise, Likelihood, NegativeBinomial, StudentT
from torchngvi.models.mixed_rows import GroupedRows
from torchngvi.models.scale_priors import HalfT, ScalePrior, checked_scale
from torchngvi.models.standardize import WIDTH
from torchngvi.numerics import linalg, small_blocks

_DOF = 4.0  # of Student's t distribution
_SIZE = 2.0  # where a search for the size begins
_FEW = 1e-3  # of the sd of y: the least residual sd of a start
_PRIOR_DOF = 3.0
_RIDGE = 1e-7  # of least squares in a group with few rows, relative


class Learned(ABC):
    """A likelihood with a parameter that is learned: its name, its energy at any value, its prior, where it starts.

    Attributes:
        name: of the parameter, as tables show it.
        slope: d log s/dφ.
        units: whether the parameter is a noise in the units of the targets.
    """

    name: str
    slope = 1.0
    units = False

    def __init__(self, prior: object = None) -> None:
        self.prior = None if prior is None else checked_scale("likelihood", prior)

    def settled(self, rows: GroupedRows) -> ScalePrior:
        """The prior of s; by default half-t of three degrees of freedom with the scale 2.5 s_y."""
        return HalfT(_PRIOR_DOF, WIDTH * float(rows.unit)) if self.prior is None else self.prior

    @abstractmethod
    def begin(self, rows: GroupedRows) -> float:
        """A value of the parameter to start from."""

    @abstractmethod
    def at(self, value: float) -> Likelihood:
        """The likelihood with a value of the parameter."""

    @abstractmethod
    def energy(self, eta: Tensor, y: Tensor, phi: Tensor) -> Tensor:
        """-log p(y | η, φ), of the broadcast shape of all three."""

    def prior_energy(self, phi: Tensor, prior: ScalePrior) -> Tensor:
        """-log p(φ), elementwise."""
        log_sd = self.slope * phi
        return -(prior.log_prob(log_sd.exp()) + log_sd + math.log(abs(self.slope)))


@final
class LearnedNoise(Learned):
    """Gaussian noise with a residual standard deviation that is learned.

    >>> phi = torch.tensor(0.5).log()
    >>> same = LearnedNoise().energy(torch.zeros(1), torch.ones(1), phi)
    >>> torch.allclose(same, GaussianNoise(0.5).energy(torch.zeros(1), torch.ones(1)))
    True
    """

    name = "residual sd"
    units = True

    def begin(self, rows: GroupedRows) -> float:
        """The spread of rows of one group about what their effects could say."""
        return within(rows)

    def at(self, value: float) -> Likelihood:
        """Gaussian noise with a standard deviation."""
        return GaussianNoise(value)

    def energy(self, eta: Tensor, y: Tensor, phi: Tensor) -> Tensor:
        """-log N(y; η, e^{2φ})."""
        return 0.5 * ((y - eta) * torch.exp(-phi)).square() + phi + 0.5 * math.log(2 * math.pi)


@final
class LearnedScale(Learned):
    """Noise of Student's t distribution with four degrees of freedom and a scale that is learned.

    >>> phi = torch.tensor(0.5).log()
    >>> same = LearnedScale().energy(torch.zeros(1), torch.ones(1), phi)
    >>> torch.allclose(same, StudentT(0.5, 4.0).energy(torch.zeros(1), torch.ones(1)))
    True
    """

    name = "scale"
    units = True

    def begin(self, rows: GroupedRows) -> float:
        """Of the spread within groups what a scale is of a standard deviation."""
        return within(rows) * math.sqrt((_DOF - 2) / _DOF)

    def at(self, value: float) -> Likelihood:
        """Noise of Student's t distribution with a scale."""
        return StudentT(value, _DOF)

    def energy(self, eta: Tensor, y: Tensor, phi: Tensor) -> Tensor:
        """½(ν + 1) log(1 + (y - η)²/(ν e^{2φ})) + φ with its constant."""
        half = 0.5 * (_DOF + 1)
        constant = math.lgamma(0.5 * _DOF) - math.lgamma(half) + 0.5 * math.log(_DOF * math.pi)
        return half * torch.log1p(((eta - y) * torch.exp(-phi)).square() / _DOF) + phi + constant


@final
class LearnedSize(Learned):
    """Negative binomial counts with a size r that is learned: variance mean + mean²/r.

    >>> phi = torch.tensor(3.0).log()
    >>> same = LearnedSize().energy(torch.zeros(1), torch.ones(1), phi)
    >>> torch.allclose(same, NegativeBinomial(3.0).energy(torch.zeros(1), torch.ones(1)))
    True
    """

    name = "size"
    slope = -0.5

    def settled(self, rows: GroupedRows) -> ScalePrior:
        """The prior of 1/√r; by default half-t of three degrees of freedom and scale 1."""
        return HalfT(_PRIOR_DOF, 1.0) if self.prior is None else self.prior

    def begin(self, rows: GroupedRows) -> float:
        """A size that makes counts neither Poisson's nor very different from them."""
        return _SIZE

    def at(self, value: float) -> Likelihood:
        """Negative binomial counts of a size."""
        return NegativeBinomial(value)

    def energy(self, eta: Tensor, y: Tensor, phi: Tensor) -> Tensor:
        """Return y softplus(-δ) + r softplus(δ) + log Γ(r) y!/Γ(y + r), δ = η - φ."""
        size, delta = phi.exp(), eta - phi
        zeros, ones = (torch.nn.functional.softplus(x, threshold=40) for x in (-delta, delta))
        return y * zeros + size * ones + torch.lgamma(size) + torch.lgamma(y + 1) - torch.lgamma(y + size)


LEARNED: dict[str, type[Learned]] = {
    "gaussian": LearnedNoise,
    "student_t": LearnedScale,
    "negative_binomial": LearnedSize,
}


def within(rows: GroupedRows) -> float:
    """The residual standard deviation within groups: of y less what X and the rows' own effects Z b can say."""
    root = rows.weights.sqrt()
    X, y, Z = rows.X * root[:, None], (rows.y - rows.offset) * root, rows.Z * root[:, None]
    there, count = rows.weights > 0, rows.weights.new_zeros(rows.n)
    effects = count.index_add(0, rows.groups, there.to(root)).clamp_max(rows.r).sum()
    free = int(rows.total(there.sum() - effects)[0]) - rows.p
    apart = torch.cat([X, y[:, None]], -1)
    if free > 0:
        apart = apart - _projected(Z, apart, rows)
    (gram,) = rows.total(apart.mT @ apart)
    slope = linalg.pseudo_solve(gram[:-1, :-1], gram[:-1, -1])
    square = float(rows.total((apart[:, -1] - apart[:, :-1] @ slope).square().sum())[0])
    variance = square / free if free > 0 else 0.5 * square / max(1, int(rows.total(there.sum())[0]))
    return max(math.sqrt(variance), _FEW * float(rows.unit))


def _projected(Z: Tensor, table: Tensor, rows: GroupedRows) -> Tensor:
    """Of each column what the effects of the groups could say of it, by least squares in each group."""
    A = Z.new_zeros(rows.n, rows.r, rows.r).index_add(0, rows.groups, Z[:, :, None] * Z[:, None, :])
    C = Z.new_zeros(rows.n, rows.r, table.shape[-1]).index_add(0, rows.groups, Z[:, :, None] * table[:, None, :])
    least = _RIDGE * A.diagonal(dim1=-2, dim2=-1).sum(-1).clamp_min(torch.finfo(A.dtype).tiny / _RIDGE)
    factor, _ = small_blocks.cholesky(A + least[:, None, None] * torch.eye(rows.r, dtype=A.dtype, device=A.device))
    b = small_blocks.tsolve(factor, small_blocks.solve(factor, C)).nan_to_num(0.0, 0.0, 0.0)
    return (Z[:, :, None] * b.index_select(0, rows.groups)).sum(1)
