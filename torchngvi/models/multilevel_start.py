"""Where a fit of a model with several grouping factors starts: penalised quasi-likelihood, as with one factor.

See `torchngvi.models.mixed_start`; the effects of all factors are solved for together, over the forest of (b, β), and
each factor has its Ω = (n + ν)(S⁻¹ + Σ_i (b_i b_iᵀ + V_i))⁻¹ by an EM iteration.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchngvi.interfaces import Coordinates
from torchngvi.models.mixed_prior import Effects, omega_of
from torchngvi.models.mixed_start import guessed, prior_counts, row_moments
from torchngvi.models.multilevel_prior import CovariancePrior, derivative
from torchngvi.models.multilevel_rows import MultilevelRows
from torchngvi.numerics.linalg import cholesky
from torchngvi.structures import Forest
from torchngvi.structures.pattern import Structured
from torchngvi.structures.storage import Part

_CLIP = 2.0  # length of the longest change of b_i, and of β
_ROUNDS = 12
_SETTLED = 0.05  # change of Ω at which the iteration ends
_FIRST = 0.7  # standard deviation of the random effects in the first round


def block_view(
    square: Tensor,  # (*batch, R, R)
    at: slice,
    count: int,  # n
) -> Tensor:
    """The n blocks (r, r) along the diagonal of a part of a matrix, as a view (*batch, n, r, r).

    >>> block_view(torch.arange(16.0).reshape(4, 4), slice(0, 4), 2).tolist()
    [[[0.0, 1.0], [4.0, 5.0]], [[10.0, 11.0], [14.0, 15.0]]]
    """
    part = square[..., at, at].unflatten(-1, (count, -1)).unflatten(-3, (count, -1))
    return part.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


def blocks_of(
    rows: MultilevelRows,
    structure: Forest,  # of the rows, with ω or bare
    matrix: Structured,
) -> list[Tensor]:
    """The blocks of the effects of each factor in a stored matrix, views of (*batch, n, r, r)."""
    parts, (chain, crossed) = structure.parts(matrix), rows.arrangement
    found: dict[int, Tensor] = {k: part.square for k, part in zip(chain, parts[:-1], strict=True)}
    for k in crossed:
        at = slice(rows.places[k].start - rows.root, rows.places[k].stop - rows.root)
        found[k] = block_view(parts[-1].square[..., 0, :, :], at, rows.factors[k].n)
    return [found[k] for k in range(len(rows.factors))]


def with_penalties(
    rows: MultilevelRows,
    gram: Structured,  # of (b, β), (*batch, E)
    omegas: Sequence[Tensor],  # Ω of each factor, (*batch, r, r)
) -> Structured:
    """Add Ω to the block of each group, and the prior precision of β: the precision of (b, β) of a linear model."""
    parts, chain = rows.bare.parts(gram), rows.arrangement.chain
    levels = []
    for k, part in zip(chain, parts[:-1], strict=True):
        square = part.square + omegas[k][..., None, :, :]
        levels.append(Part(square, part.border.expand(*square.shape[:-3], *part.border.shape[-3:])))
    top = with_root_penalties(rows, parts[-1].square[..., 0, :, :], omegas)[..., None, :, :]
    return rows.bare.matrix([*levels, Part(top, top[..., :0, :])])


def with_root_penalties(
    rows: MultilevelRows,
    square: Tensor,  # of the crossed effects and β, (*batch, R, R)
    omegas: Sequence[Tensor],  # Ω of each factor, (*batch, r, r)
) -> Tensor:
    """Add Ω of the crossed factors to the blocks of their groups, and the prior precision of β."""
    width = square.shape[-1]
    batch = torch.broadcast_shapes(square.shape[:-2], omegas[0].shape[:-2])
    top = square.flatten(-2).expand(*batch, -1)
    for k in rows.arrangement.root:
        n, r = rows.factors[k].n, rows.factors[k].r
        first = rows.places[k].start - rows.root + r * torch.arange(n, device=square.device)
        own = first[:, None] + torch.arange(r, device=square.device)
        index = (width * own[:, :, None] + own[:, None, :]).flatten()
        top = top.index_add(-1, index, omegas[k][..., None, :, :].expand(*batch, n, r, r).flatten(-3))
    at = torch.arange(rows.beta.start, rows.beta.stop, device=square.device) - rows.root
    prior = rows.fixed.prior.add_to(square.new_zeros(rows.p, rows.p))
    top = top.index_add(-1, (width * at[:, None] + at).flatten(), prior.flatten().expand(*batch, -1))
    return top.unflatten(-1, (width, width))


class _Penalised:
    """The penalised quasi-likelihood of (b, β) given the Ω of all factors."""

    def __init__(self, rows: MultilevelRows) -> None:
        self.rows, self.prior, self.structure = rows, rows.fixed.prior, rows.bare

    def root(self, curvature: Tensor, omegas: Sequence[Tensor]) -> Structured:
        """T of the precision, from the weighted curvatures of the rows and Ω."""
        return self.structure.cholesky(with_penalties(self.rows, self.rows.gram(curvature, self.structure), omegas))[0]

    def solved(self, root: Structured, g: Tensor) -> Tensor:
        """S⁻¹ g."""
        return self.structure.tsolve(root, self.structure.solve(root, g))

    def penalty(self, theta: Tensor, omegas: Sequence[Tensor]) -> Tensor:
        """The gradient of the quadratic penalties."""
        g = torch.zeros_like(theta)
        effects, beta, _ = self.rows.parts(theta)
        for at, b, omega in zip(self.rows.places, effects, omegas, strict=True):
            g[at] = (b @ omega).flatten()
        g[self.rows.beta] = self.prior.force(beta)
        return g

    def clipped(self, step: Tensor) -> Tensor:
        """With no change of b_i or β longer than the clip."""
        short = step.clone()
        effects, beta, _ = self.rows.parts(step)
        for at, x in zip((*self.rows.places, self.rows.beta), (*effects, beta), strict=True):
            length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
            short[at] = (x * (_CLIP / length).clamp_max(1.0)).flatten()
        return short

    def covariances(self, root: Structured) -> list[Tensor]:
        """The covariances V_i of the effects of each factor, (n, r, r)."""
        return blocks_of(self.rows, self.structure, self.structure.marginals(self.structure.inverse(root), True))


def updated(b: Tensor, V: Tensor, prior: CovariancePrior) -> Tensor:
    """Ω by an EM iteration from the means (n, r) and covariances (n, r, r) of the effects."""
    known, count = prior_counts(prior)
    new = (len(b) + count) * torch.linalg.inv(known + b.mT @ b + V.sum(0))
    return 0.5 * (new + new.mT)


def started(rows: MultilevelRows, priors: Sequence[CovariancePrior]) -> Coordinates:
    """Mean and root of the precision of a start, over all coordinates."""
    penalised, like = _Penalised(rows), rows.X
    omegas = [torch.eye(of.r, dtype=like.dtype, device=like.device) / _FIRST**2 for of in rows.factors]
    aim = guessed(rows)
    curvature = row_moments(rows, aim).curvature
    root = penalised.root(curvature, omegas)
    nothing = like.new_zeros(rows.bare.dim)  # where the penalty is the pull of the prior mean
    aimed = rows.gathered(curvature * (aim - rows.offset), rows.bare.dim) - penalised.penalty(nothing, omegas)
    theta = penalised.solved(root, aimed)
    for _ in range(_ROUNDS):
        _, alpha, curvature = row_moments(rows, rows.predictor(theta))
        root = penalised.root(curvature, omegas)
        gradient = rows.gathered(alpha, rows.bare.dim) + penalised.penalty(theta, omegas)
        theta = theta - penalised.clipped(penalised.solved(root, gradient))
        effects, V = rows.parts(theta)[0], penalised.covariances(root)
        new = [updated(b, v, prior) for b, v, prior in zip(effects, V, priors, strict=True)]
        changes = [torch.linalg.solve(old, now) for old, now in zip(omegas, new, strict=True)]
        omegas = new
        if max(float((x - torch.eye(len(x)).to(x)).square().sum()) for x in changes) < _SETTLED**2:
            break
    entries = [omega_of(cholesky(omega)[0]) for omega in omegas]
    squares = [_spread(*known) for known in zip(effects, V, entries, priors, strict=True)]
    parts = penalised.structure.parts(root)
    top = torch.block_diag(parts[-1].square[0], *squares)[None]
    width = top.shape[-1] - parts[-1].square.shape[-1]
    levels = [
        Part(
            part.square,
            torch.cat([part.border, part.border.new_zeros(len(part.border), width, part.border.shape[-1])], 1),
        )
        for part in parts[:-1]
    ]
    return Coordinates(torch.cat([theta, *entries]), rows.structure.matrix([*levels, Part(top, top[:, :0])]))


def _spread(b: Tensor, V: Tensor, omega: Tensor, prior: CovariancePrior) -> Tensor:
    """A root of the precision of ω beside known effects, (q, q)."""
    nothing, (n, r), q = b.new_zeros(()), b.shape, len(omega)
    sure = torch.eye(q, dtype=b.dtype, device=b.device) / n  # any prior is integrated over something
    H = derivative(Effects(b, omega, V, nothing.expand(n, q, r), sure), prior).omega_omega
    factor, ok = cholesky(H)
    return factor if bool(ok) else H.diagonal().clamp_min(1.0).sqrt().diag()
