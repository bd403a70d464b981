"""What a fitted mixed model says in the units of its data: fixed effects, sds and correlations of random effects."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from torchngvi.errors import InputError
from torchngvi.models import checks
from torchngvi.models.mixed_prior import root_of, scales_of
from torchngvi.models.mixed_rows import GroupedRows
from torchngvi.models.mixed_units import omega_to_user, rows_of_user, to_user
from torchngvi.models.standardize import Standardization
from torchngvi.posteriors.gaussian import Gaussian
from torchngvi.structures import Forest

_AT_ONCE = 2**23  # numbers of which quantiles are found together


@dataclass(frozen=True)
class MixedSummary:
    """Posterior means and standard deviations of a `torchngvi.MixedModel`, as `MixedModel.summary` returns them.

    Those of random effects are of the standard deviations and correlations in Ω⁻¹, the covariance of b.  A Gaussian q
    understates their uncertainty.  Of many sets of targets every shape has that of the batch in front.

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

    def member(self, index: int | tuple[int, ...]) -> "MixedSummary":
        """Take the summary of one of many sets of targets.

        Args:
            index: its place in the batch.

        Returns:
            Its numbers, without the shape of the batch in front.

        >>> many = torch.ones(3, 1)
        >>> square = many[..., None]
        >>> MixedSummary(many, many, many, many, torch.ones(3, 2, 1), square, square, square, square).member(2).fixed
        tensor([1.])
        """
        return MixedSummary(*(getattr(self, part.name)[index] for part in fields(self)))

    def __str__(self) -> str:
        if self.fixed.ndim > 1:
            return f"{self.fixed[..., 0].numel()} mixed models of one design: member(k) is the table of one"
        lines = [f"{'fixed effects':<14}{'mean':>11}{'sd':>11}"]
        lines += _lines(self.fixed, self.fixed_sd)
        lines.append(f"{'sd of random':<14}{'mean':>11}{'sd':>11}{'2.5 %':>11}{'97.5 %':>11}")
        lines += _lines(self.sd, self.sd_sd, *self.sd_interval)
        size = len(self.sd)
        if size > 1:
            lines.append(f"{'correlations':<14}{'mean':>11}{'sd':>11}")
            pairs = [(i, k) for i in range(size) for k in range(i)]
            columns = [torch.stack([x[i, k] for i, k in pairs]) for x in (self.correlation, self.correlation_sd)]
            lines += _lines(*columns, names=[f"{i} with {k}" for i, k in pairs])
        n = len(self.group)
        return "\n".join([*lines, f"{n} group{'s' if n > 1 else ''}"])


def _lines(*columns: Tensor, names: Sequence[object] | None = None) -> list[str]:
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return [
        f"  {index:<12}" + "".join(f"{x:>11.4g}" for x in row)
        for index, row in zip(names or range(len(columns[0])), rows, strict=True)
    ]


def summarised(rows: GroupedRows, structure: Forest, q: Gaussian, draws: int, seed: int) -> MixedSummary:
    """Summarise q over the coordinates of a mixed model."""
    frame = q.frame()
    b, beta, omega = rows.parts(frame.mean)
    generator = torch.Generator(omega.device).manual_seed(seed)
    z = torch.randn(draws, omega.shape[-1], generator=generator, dtype=omega.dtype, device=omega.device)
    V_b, V = _covariances(rows, structure, q)
    root = torch.linalg.cholesky(V[..., rows.p :, rows.p :])
    around = root @ z.mT  # (*batch, q, draws), the same draws for all members
    sd, correlation = scales_of(omega_to_user(omega + around.movedim(-1, 0), rows.within, rows.r), rows.r)
    ends = torch.tensor([0.025, 0.975], dtype=sd.dtype, device=sd.device)
    some = sd.flatten(1).split(max(1, _AT_ONCE // draws), -1)
    interval = torch.cat([torch.quantile(part, ends, dim=0) for part in some], -1).unflatten(-1, sd.shape[1:])
    return MixedSummary(
        to_user(beta, rows.columns),
        _sd_to_user(V[..., : rows.p, : rows.p], rows.columns),
        sd.mean(0),
        sd.std(0),
        interval.movedim(0, -2),
        correlation.mean(0),
        correlation.std(0),
        to_user(b, rows.within),
        _sd_to_user(V_b, rows.within),
    )


def _sd_to_user(
    V: Tensor,  # (*any, D, D)
    units: Standardization | None,
) -> Tensor:
    """The standard deviations of coefficients in the units of the user, (*any, D)."""
    if units is None:
        return V.diagonal(dim1=-2, dim2=-1).sqrt()
    root = units.to_user(torch.linalg.cholesky(V), -2)
    return torch.linalg.vector_norm(root, dim=-1)


def _covariances(rows: GroupedRows, structure: Forest, q: Gaussian) -> tuple[Tensor, Tensor]:
    """The covariances under q of the effects of each group (*batch, n, r, r), and of the globals (*batch, P, P)."""
    frame, local = q.frame(), rows.n * rows.r
    if frame.structure == structure:
        groups, roots = structure.parts(frame.marginals())
        return groups.square, roots.square[..., 0, :, :]
    root = frame.dense()
    b, g = root[..., :local, :].unflatten(-2, (rows.n, rows.r)), root[..., local:, :]
    return b @ b.mT, g @ g.mT


def predicted(
    rows: GroupedRows,
    q: Gaussian,
    X: Any,  # (M, p)
    Z: Any,  # (M, r)
    groups: Any,  # (M,), or None
    draws: int,
    seed: int,
) -> Tensor:
    """Draw linear predictors of new rows, of groups of the data or of one group that the data do not have."""
    X, Z = checks.numbers("X", X, rows.X), checks.numbers("Z", Z, rows.X)
    if X.shape[1:] != (rows.p,) or Z.shape != (len(X), rows.r):
        raise InputError(
            f"new rows need X of shape (M, {rows.p}) and Z of shape (M, {rows.r}); got {tuple(X.shape)} and "
            f"{tuple(Z.shape)}."
        )
    X, Z = rows_of_user(X, rows.columns), rows_of_user(Z, rows.within)
    generator = torch.Generator(X.device).manual_seed(seed)
    b, beta, omega = rows.parts(q.sample((draws,), generator))
    if groups is not None:
        index = checks.group_index(groups, len(X), X)
        if bool(((index < 0) | (index >= rows.n)).any()):
            raise InputError(
                f"groups of new rows must be those of the data, 0 to {rows.n - 1}; got {int(index.min())} to "
                f"{int(index.max())}. Leave groups= out for a group that the data do not have."
            )
        return beta @ X.mT + (b.index_select(-2, index) * Z).sum(-1)
    noise = torch.randn(draws, *rows.batch, rows.r, 1, generator=generator, dtype=X.dtype, device=X.device)
    new = torch.linalg.solve_triangular(root_of(omega, rows.r).mT, noise, upper=True)
    return beta @ X.mT + new[..., 0] @ Z.mT
