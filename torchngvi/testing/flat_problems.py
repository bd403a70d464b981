"""The flat posteriors that metrics and estimators are tried on, with their laws as ``torch.distributions`` has them."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributions import Beta as BetaLaw
from torch.distributions import Distribution, Independent, MultivariateNormal, Normal, kl_divergence

from torchngvi.posteriors.flat import (
    Beta,
    FlatCholesky,
    FlatPosterior,
    MeanFieldGaussian,
    OrthogonalFlow,
    RankOneGaussian,
)
from torchngvi.testing.claims import DTYPE, normal

_AWAY = 0.05  # of members from one another, in λ


def _mean_field() -> FlatPosterior:
    return MeanFieldGaussian(torch.tensor([0.3, -0.2, -1.5, 1.0], dtype=DTYPE))


def _cholesky() -> FlatPosterior:
    covariance = torch.tensor([[2.0, 0.2], [0.2, 0.06]], dtype=DTYPE)
    return FlatCholesky(torch.tensor([0.4, -0.1], dtype=DTYPE), covariance)


def _beta() -> FlatPosterior:
    return Beta(torch.tensor([2.5, 12.0], dtype=DTYPE))


def _rank_one() -> FlatPosterior:
    rows = [[0.2, -0.4, 0.1], [0.6, -0.3, 0.8], [1.0, 0.2, 2.0]]
    return RankOneGaussian(*torch.tensor(rows, dtype=DTYPE))


def _on_a_manifold() -> FlatPosterior:
    turn = torch.linalg.qr(torch.tensor([[1.0, 0.4], [-0.3, 1.0]], dtype=DTYPE))[0]
    return OrthogonalFlow(torch.tensor([0.3, -0.5], dtype=DTYPE), turn, torch.tensor([0.1, 0.2], dtype=DTYPE))


FLAT: dict[str, Callable[[], FlatPosterior]] = {
    "MeanFieldGaussian": _mean_field,
    "FlatCholesky": _cholesky,
    "Beta": _beta,
    "RankOneGaussian": _rank_one,
    "OrthogonalFlow": _on_a_manifold,
}


def _mean_field_law(lam: Tensor) -> Distribution:
    return Independent(Normal(lam[..., :2], lam[..., 2:].exp()), 1)


def _cholesky_law(lam: Tensor) -> Distribution:
    zero = torch.zeros_like(lam[..., 0])
    rows = [[lam[..., 2].exp(), zero], [lam[..., 3], lam[..., 4].exp()]]
    root = torch.stack([torch.stack(row, -1) for row in rows], -2)
    return MultivariateNormal(lam[..., :2], scale_tril=root)


def _beta_law(lam: Tensor) -> Distribution:
    return Independent(BetaLaw(lam[..., :1], lam[..., 1:]), 1)


def _rank_one_law(lam: Tensor) -> Distribution:
    mean, b, c = lam.chunk(3, -1)
    return MultivariateNormal(mean, b[..., :, None] * b[..., None, :] + c.square().diag_embed())


LAWS: dict[str, Callable[[Tensor], Distribution]] = {
    "MeanFieldGaussian": _mean_field_law,
    "FlatCholesky": _cholesky_law,
    "Beta": _beta_law,
    "RankOneGaussian": _rank_one_law,
}


def several(q: FlatPosterior, batch: tuple[int, ...], seed: int) -> FlatPosterior:
    """Make a batch of posteriors near one, on its manifold where there is one.

    >>> several(FLAT["Beta"](), (2, 3), seed=0).vector.shape
    torch.Size([2, 3, 2])
    """
    vector = q.vector.detach()
    if not batch:
        return q.at(vector)
    vector = vector.expand(*batch, q.size).contiguous()
    change = _AWAY * normal(*batch, q.size, seed=seed).to(vector.dtype)
    return q.at(q.retracted(vector, q.projected(vector, change)))


def fisher(
    law: Callable[[Tensor], Distribution],
    vector: Tensor,  # (D,)
) -> Tensor:  # (D, D)
    """Compute the Fisher matrix of a law by autograd, as the Hessian of KL(q_λ₀ ‖ q_λ) at λ = λ₀.

    >>> fisher(LAWS["MeanFieldGaussian"], torch.zeros(4)).diagonal().tolist()
    [1.0, 1.0, 2.0, 2.0]
    """
    there = law(vector.detach())

    def divergence(lam: Tensor) -> Tensor:
        return kl_divergence(there, law(lam)).sum()

    return torch.autograd.functional.hessian(divergence, vector.detach())
