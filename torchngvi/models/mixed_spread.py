"""Mixed models whose groups are spread over processes: what is counted once, and what depends on all of the data.

Each process has the rows of its own groups, and of q the effects of these beside the globals.  Sums over groups, and
over their rows, are completed by `torchngvi.models.mixed_rows.GroupedRows.total`.
"""

import copy
import math
from abc import abstractmethod
from typing import Self

import torch
from torch import Tensor

from torchngvi.distributed import Processes
from torchngvi.interfaces import Frame, Framed, Prior, Raw, TractableTarget
from torchngvi.models.effects_prior import CovariancePrior
from torchngvi.models.generalized_linear import GeneralizedLinear
from torchngvi.models.mixed_prior import MixedPrior, Precision
from torchngvi.models.mixed_rows import GroupedRows
from torchngvi.models.mixed_units import Levels, covariance_prior_of, set_columns, set_effects
from torchngvi.numerics.versions import settings_of, tensors_of
from torchngvi.posteriors import PrecisionCholeskyGaussian
from torchngvi.renamed import warn_renamed
from torchngvi.structures import Forest
from torchngvi.structures.pattern import Structured

_AT_ONCE = 10_000  # groups of one process that are worked on together


class SpreadGroups(TractableTarget):
    """The abstract base of mixed models with one grouping factor, whose groups may be spread over processes.

    Attributes:
        structure: the arrow of the model.
        dim: the number of coordinates of q here.
        fixed: the model of the same rows without random effects.
        rows: the rows with their groups.
        asked: the prior as the user gave it.
        covariance_prior: the prior of ω.
        groups_at_once: of a fit in passes over groups, where they are spread over processes; None for one process.
    """

    structure: Forest
    dim: int
    fixed: GeneralizedLinear
    rows: GroupedRows
    asked: MixedPrior
    covariance_prior: CovariancePrior

    @property
    def precision(self) -> CovariancePrior:
        """The prior of ω under its old name ``precision``, with a warning."""
        warn_renamed(type(self).__name__, "precision", "covariance_prior")
        return self.covariance_prior

    @property
    def all_dim(self) -> int:
        """The number of coordinates of all processes."""
        return self.dim + (self.rows.all_groups - self.rows.n) * self.rows.r

    def spread(self, processes: Processes) -> Self:
        """Make the model of the groups of several processes, of which this is the part of one; see `torchngvi.Sharded`.

        Args:
            processes: the ranks.

        Returns:
            A copy with the prior that the groups of all of them make, where none was given.
        """
        new = copy.copy(self)
        new.rows, new.processes, new.groups_at_once = self.rows.spread(processes), processes, _AT_ONCE
        new.settle()
        return new

    def settle(self) -> None:
        """Set what depends on the data of all processes: centres and scales of columns, and the priors."""
        levels = Levels.of(self.rows)
        self.rows.unit = levels.unit
        if self.asked.fixed_scale is None:
            self.fixed = self.rows.fixed = copy.copy(self.fixed)
            set_columns(self.rows, self.fixed, levels)
        if self.asked.usual:
            set_effects(self.rows)
        self.covariance_prior = covariance_prior_of(self.asked, self.rows)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return every tensor that a value depends on."""
        covariance = (self.covariance_prior.scale,) if isinstance(self.covariance_prior, Precision) else ()
        return (
            self.rows.X,
            self.rows.Z,
            self.rows.groups,
            self.rows.y,
            self.rows.weights,
            self.rows.offset,
            *covariance,
            *self.fixed.prior,
            *tensors_of(self.rows.likelihood),
        )

    def settings(self) -> tuple[object, ...]:
        """Return the settings of the likelihood, and of the prior of ω."""
        return (*settings_of(self.rows.likelihood), *self.covariance_prior.settings())

    def known_data(self) -> tuple[Tensor, ...]:
        """Return the tensors that a value depends on; of groups of other processes the value of the loss tells."""
        return self.tensors() if self.processes is None else ()

    def expected_energy(self, frame: Frame) -> tuple[Tensor, Framed | Raw]:  # type: ignore[override]
        """Compute E_q[ℓ] (*batch,), differentiable in the frame, and its derivative.

        A q over the structure of the model gives a packet in its frame, and nothing is D x D; any other Gaussian, such
        as a dense one of few groups, one in θ.

        Raises:
            InputError: groups that are spread over processes, and q with them.
        """
        self.rows.check_one_process("a step or a bound over all coordinates")
        structure = self.structure
        if frame.structure == structure and frame.upper:
            value, g, H = self.moments(frame.mean, frame.marginals())
            return value, Framed(frame.pull(g), structure.congruence(frame.root, H))
        root = frame.dense()
        value, g, H = self.moments(frame.mean, structure.from_dense(root @ root.mT))
        return value, Raw(g, structure.full(H))

    @abstractmethod
    def moments(
        self,
        mean: Tensor,  # m, (*batch, D)
        covariance: Structured,  # V in the pattern of the structure
    ) -> tuple[Tensor, Tensor, Structured]:
        """Compute E_q[ℓ], g = E_q[∇ℓ] and H = E_q[∇²ℓ], which has the pattern of the structure."""

    def shared_energy(
        self,
        mean: Tensor,  # of the globals, (*any, P)
        covariance: Tensor,  # (*any, P, P)
    ) -> Tensor:
        """Compute E[-log p(β) - log p(ω)], the terms that no group has, (*any,)."""
        p, prior = self.rows.p, self.fixed.prior
        assert isinstance(prior, Prior)
        spread = 0.5 * (prior.precision * covariance[..., :p, :p].diagonal(dim1=-2, dim2=-1)).sum(-1)
        of_omega = self.covariance_prior.expected_energy(mean[..., p:], covariance[..., p:, p:])
        return prior.energy(mean[..., :p]) + spread + of_omega

    def _loss(self, q: PrecisionCholeskyGaussian) -> Tensor:
        """The negative ELBO, (*batch,); what is of the globals alone is counted once."""
        if self.processes is None:
            return self.expected_energy(q.frame())[0] - q.entropy()
        frame, size = q.frame(), self.dim - self.rows.n * self.rows.r
        V = frame.marginals()
        loss = self.moments(frame.mean, V)[0] - q.entropy()
        if not self.rows.leads:
            shared = self.structure.parts(V)[-1].square
            entropy = 0.5 * torch.linalg.slogdet(shared[..., 0, :, :])[1] + 0.5 * size * (1 + math.log(2 * math.pi))
            loss = loss - self.shared_energy(frame.mean[..., None, -size:], shared)[..., 0] + entropy
        return self.rows.total(loss)[0]
