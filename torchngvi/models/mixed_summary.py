"""What a fitted mixed model says in the units of its data: fixed effects, sds and correlations of random effects."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torchngvi.models.mixed_prior import root_of
from torchngvi.posteriors.gaussian import Gaussian

if TYPE_CHECKING:
    from torchngvi.models.mixed import MixedModel


@dataclass(frozen=True)
class MixedSummary:
    """Posterior means and standard deviations of a `torchngvi.MixedModel`, as `MixedModel.summary` returns them.

    Those of random effects are of the standard deviations and correlations in Ω⁻¹, the covariance of b.  A Gaussian q
    understates their uncertainty.

    Attributes:
        fixed: means of β, (p,).
        fixed_sd: their standard deviations, (p,).
        sd: means of the standard deviations of the random effects, (r,).
        sd_sd: their standard deviations, (r,).
        sd_interval: their 2.5 % and 97.5 % quantiles, (2, r).
        correlation: means of the correlations of the random effects, (r, r).
        correlation_sd: their standard deviations, (r, r).
        group: means of the effects of each group, (n, r).
        group_sd: their standard deviations, (n, r).

    >>> one = torch.ones(1)
    >>> print(MixedSummary(one, one, one, one, torch.ones(2, 1), one[None], one[None], one[None], one[None]))
    fixed effects        mean         sd
      0                     1          1
    sd of random         mean         sd      2.5 %     97.5 %
      0                     1          1          1          1
    1 group
    """

    fixed: Tensor  # (p,)
    fixed_sd: Tensor  # (p,)
    sd: Tensor  # (r,)
    sd_sd: Tensor  # (r,)
    sd_interval: Tensor  # (2, r)
    correlation: Tensor  # (r, r)
    correlation_sd: Tensor  # (r, r)
    group: Tensor  # (n, r)
    group_sd: Tensor  # (n, r)

    def __str__(self) -> str:
        lines = [f"{'fixed effects':<14}{'mean':>11}{'sd':>11}"]
        lines += _lines(self.fixed, self.fixed_sd)
        lines.append(f"{'sd of random':<14}{'mean':>11}{'sd':>11}{'2.5 %':>11}{'97.5 %':>11}")
        lines += _lines(self.sd, self.sd_sd, *self.sd_interval)
        size = len(self.sd)
        if size > 1:
            lines.append(f"{'correlations':<14}{'mean':>11}{'sd':>11}")
            lines += [
                f"  {f'{l} with {k}':<12}{float(self.correlation[l, k]):>11.4g}{float(self.correlation_sd[l, k]):>11.4g}"
                for l in range(size)  # noqa: E741  the indices of the literature
                for k in range(l)
            ]
        n = len(self.group)
        return "\n".join([*lines, f"{n} group{'s' if n > 1 else ''}"])


def _lines(*columns: Tensor) -> list[str]:
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return [f"  {index:<12}" + "".join(f"{x:>11.4g}" for x in row) for index, row in enumerate(rows)]


def drawn_precisions(
    omega: Tensor,  # (S, q)
    size: int,  # r
) -> Tensor:
    """The roots W of drawn precisions Ω = W Wᵀ, (S, r, r)."""
    return root_of(omega, size)


def summarised(model: "MixedModel", q: Gaussian, draws: int, seed: int) -> MixedSummary:
    """Summarise q over the coordinates of a model."""
    frame = q.frame()
    b, beta, omega = model.parts(frame.mean)
    b_variance, beta_variance, _ = model.parts(frame.variance)
    generator = torch.Generator(omega.device).manual_seed(seed)
    z = torch.randn(draws, len(omega), generator=generator, dtype=omega.dtype, device=omega.device)
    W = root_of(omega + z @ _covariance(model, q).mT, model.r)
    root = torch.linalg.solve_triangular(W, torch.eye(model.r, dtype=W.dtype, device=W.device), upper=False)
    covariance = root.mT @ root
    sd = covariance.diagonal(dim1=-2, dim2=-1).sqrt()
    correlation = covariance / (sd[:, :, None] * sd[:, None, :])
    ends = torch.tensor([0.025, 0.975], dtype=sd.dtype, device=sd.device)
    return MixedSummary(
        beta,
        beta_variance.sqrt(),
        sd.mean(0),
        sd.std(0),
        torch.quantile(sd, ends, dim=0),
        correlation.mean(0),
        correlation.std(0),
        b,
        b_variance.sqrt(),
    )


def _covariance(model: "MixedModel", q: Gaussian) -> Tensor:
    """A root of the covariance of ω under q, (q, q)."""
    frame, p = q.frame(), model.p
    if frame.structure == model.structure:
        V = model.structure.parts(frame.marginals())[-1].square[0]
        return torch.linalg.cholesky(V[p:, p:])
    start = model.n * model.r + p
    rows = frame.dense()[start:]
    return torch.linalg.cholesky(rows @ rows.mT)
