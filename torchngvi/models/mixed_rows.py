"""The rows of a mixed model: their designs, the group of each, and sums by group."""

import copy
from typing import Any, Self

import torch
from torch import Tensor

from torchngvi.distributed import Processes
from torchngvi.errors import InputError
from torchngvi.models import checks
from torchngvi.models.generalized_linear import GeneralizedLinear
from torchngvi.models.standardize import Standardization
from torchngvi.numerics import sparse
from torchngvi.numerics.linalg import column_rank
from torchngvi.structures.storage import Part

_AT_ONCE = 65_536  # rows of which everything is computed together on the CPU
Sums = tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


class GroupedRows:
    """Rows with fixed effects β and random effects b of groups, η = Xβ + Z b_group + offset.

    Attributes:
        batch: the shape of the targets without their rows, () for one set of targets.
        n: the number of groups, r that of the effects of each, p that of the fixed effects.
        processes: those over which the groups are spread, each of which has the rows of its own; None for one process.
        all_groups: the number of groups of all processes.
        columns: how X has been centred and scaled; None where it is as it was given.
        within: the same of Z.
        unit: s_y of default priors, the standard deviation of y for the identity link and 1 for any other, (*batch,).

    >>> fixed = GeneralizedLinear(torch.ones(3, 1), [1.0, 0.0, 2.0], "poisson_log")
    >>> rows = GroupedRows(fixed, torch.ones(3, 1), [0, 1, 1])
    >>> rows.n, rows.r, rows.p
    (2, 1, 1)
    >>> rows.predictor(torch.tensor([1.0, 2.0, 0.5, 0.0])).tolist()
    [1.5, 2.5, 2.5]
    """

    processes: Processes | None = None
    columns: Standardization | None = None
    within: Standardization | None = None
    unit = torch.ones((), dtype=torch.float64)

    def __init__(self, fixed: GeneralizedLinear, Z: Any, groups: Any, members: bool = False) -> None:
        self.fixed, self.X, self.likelihood = fixed, fixed.X, fixed.likelihood
        if sparse.is_sparse(self.X) or self.X.ndim > 2 or (fixed.y.ndim > 1 and not members):
            raise InputError(
                "a MixedModel has one dense design X (N, p) and targets y (N,); got X of shape "
                f"{tuple(self.X.shape)}, {self.X.layout}, and y of {tuple(fixed.y.shape)}."
            )
        self.batch, rows = fixed.y.shape[:-1], len(self.X)
        for name, given in (("weights", fixed.weights), ("offset", fixed.offset)):
            if given.shape not in ((rows,), fixed.y.shape):
                either = f"({rows},)" + f", or the shape of y, {tuple(fixed.y.shape)}" * bool(self.batch)
                raise InputError(f"{name} must have one entry a row, {either}; got shape {tuple(given.shape)}.")
        self.Z, self.groups = checks.grouped(Z, groups, self.X)
        if (rank := column_rank(self.Z)) < self.Z.shape[1]:
            raise InputError(
                f"the {self.Z.shape[1]} columns of Z, the design of the random effects, must be linearly independent; "
                f"their rank is {rank}. Leave a column out."
            )
        self.y, self.weights, self.offset = fixed.y, fixed.weights, fixed.offset
        self.n, self.r, self.p = int(self.groups.max()) + 1, self.Z.shape[1], self.X.shape[1]
        self.all_groups = self.n

    # ---------------------------------------------------------------------------- over processes

    def spread(self, processes: Processes) -> Self:
        """Make the same rows as those of one of several processes, each of which has groups of its own."""
        new = copy.copy(self)
        new.processes, (count,) = processes, processes.total([torch.tensor([self.n], dtype=torch.float64)])
        new.all_groups = int(count)
        return new

    @property
    def leads(self) -> bool:
        """Whether what is to be counted once, such as a prior, is counted here."""
        return self.processes is None or self.processes.leads

    def total(self, *parts: Tensor) -> list[Tensor]:
        """Complete sums over the groups, or their rows, by those of the other processes."""
        return list(parts) if self.processes is None else self.processes.total(parts)

    def check_one_process(self, what: str) -> None:
        """Check that all groups are here."""
        if self.processes is not None:
            raise InputError(
                f"{what} needs all groups in one process, and here they are spread over {self.processes.world}. Use "
                "fit(model.posterior(), model) on every rank."
            )

    # ---------------------------------------------------------------------------- one set of targets

    def check_one(self, what: str) -> None:
        """Check that there is one set of targets."""
        if self.batch:
            raise InputError(
                f"{what} takes one set of targets y (N,); got y of shape {tuple(self.y.shape)}. Fit many of them by "
                "fit(model.posterior(), model), or make a model of each."
            )

    def blocks(self) -> "list[GroupedRows]":
        """Take the rows a few at a time, as views: what is computed of each row need not be there for all of them."""
        if not self.X.is_cpu or self.batch or len(self.X) <= _AT_ONCE:
            return [self]
        made = []
        for start in range(0, len(self.X), _AT_ONCE):
            at = slice(start, start + _AT_ONCE)
            block = copy.copy(self)
            block.X, block.Z, block.groups = self.X[at], self.Z[at], self.groups[at]
            block.y, block.weights, block.offset = self.y[at], self.weights[at], self.offset[at]
            made.append(block)
        return made

    def parts(
        self,
        theta: Tensor,  # (*any, D)
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Take θ apart: b (*any, n, r), β (*any, p) and ω (*any, r(r + 1)/2)."""
        b, beta, omega = theta.split([self.n * self.r, self.p, theta.shape[-1] - self.n * self.r - self.p], -1)
        return b.unflatten(-1, (self.n, self.r)), beta, omega

    def predictor(
        self,
        theta: Tensor,  # (*sample, *batch, D)
    ) -> Tensor:
        """Compute η = Xβ + Z b + offset, (*sample, *batch, N)."""
        b, beta, _ = self.parts(theta)
        return beta @ self.X.mT + self.offset + (b.index_select(-2, self.groups) * self.Z).sum(-1)

    def present(
        self,
        x: Tensor,  # (*batch, N)
        otherwise: float,
    ) -> Tensor:
        """Put a number for rows of weight 0, which are not there, also where their loss would be infinite."""
        return torch.where(self.weights > 0, x, otherwise)

    def variances(
        self,
        parts: Part,  # V_bb and V_βb, of each group
        between: Tensor,  # V_ββ
    ) -> Tensor:
        """The variances of the predictors of rows, zᵀV_bb z + 2 xᵀV_βb z + xᵀV_ββ x, (*batch, N)."""
        X, Z, groups = self.X, self.Z, self.groups
        square = parts.square.index_select(-3, groups)
        border = parts.border[..., : X.shape[-1], :].index_select(-3, groups)
        local = (Z[:, None, :] * square).sum(-1) + 2 * (X[:, :, None] * border).sum(-2)
        return (local * Z).sum(-1) + ((X @ between) * X).sum(-1)

    def summed(
        self,
        alpha: Tensor,  # of each row, (*batch, N)
        beta: Tensor,
        to: Sums | None = None,
    ) -> Sums:
        """Σ α (z, x) and Σ β (z, x)(z, x)ᵀ: by group in the parts of b, over all rows in that of the fixed effects."""
        X, Z, batch = self.X, self.Z, alpha.shape[:-1]
        if to is None:
            sizes = (self.n, self.r), (self.p,), (self.n, self.r, self.r), (self.n, self.p, self.r), (self.p, self.p)
            g_b, g_beta, bb, border, bebe = (alpha.new_zeros(*batch, *size) for size in sizes)
            to = (g_b, g_beta), (bb, border, bebe)
        (g_b, g_beta), (bb, border, bebe) = to
        g_b.index_add_(-2, self.groups, alpha[..., None] * Z)
        g_beta += alpha @ X
        scaled = beta[..., None] * Z
        bb.index_add_(-3, self.groups, scaled[..., None, :] * Z[:, :, None])
        border.index_add_(-3, self.groups, scaled[..., None, :] * X[:, :, None])
        bebe += (X * beta[..., None]).mT @ X
        return to
