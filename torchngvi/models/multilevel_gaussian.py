"""A linear mixed model with several grouping factors, with all effects integrated out in closed form.

With u = (b, β), r the residuals at the least-squares estimate β̂, P the prior precision of β, and weights w,

    log p(y | ω, σ) = -½ Σ w log 2πσ² - ½ rᵀwr/σ² - ½ β̂ᵀPβ̂ + Σ_k ½n_k log|Ω_k| + ½ log|P| - ½ log|M| + ½ cᵀM⁻¹c,
    M = UᵀwU/σ² + blockdiag(Ω, P),        c = Uᵀwr/σ² - (0, Pβ̂),

U the rows (z, x), and (b, β - β̂) | y, ω, σ ~ N(M⁻¹c, M⁻¹) (Bates and others 2015, Journal of Statistical Software
67(1), where M is factored by sparse Cholesky).  M has the pattern of the forest of the factors, and UᵀwU is made once,
so that a value does not depend on the number of rows.
"""

import math
from typing import final

import torch
from torch import Tensor

from torchngvi.arguments import read_instance
from torchngvi.interfaces import Posterior, Target
from torchngvi.models import checks
from torchngvi.models.learned import Learned
from torchngvi.models.likelihoods import GaussianNoise
from torchngvi.models.mixed_integrated import InChunks
from torchngvi.models.mixed_prior import root_of, starts
from torchngvi.models.multilevel import MultilevelLogJoint
from torchngvi.models.multilevel_patterns import Leaves
from torchngvi.models.multilevel_start import with_penalties, with_root_penalties
from torchngvi.models.scale_priors import ScalesPrior
from torchngvi.numerics import linalg
from torchngvi.structures.pattern import Structured

_AT_ONCE = 2**21  # numbers of the matrices that are factored at once


@final
class GaussianMultilevel(Target):
    """The log joint log p(y, ω, φ) of the variance parameters of a linear model with several grouping factors.

    One wants it where noise is Gaussian: nothing is approximated.  Fixed effects are integrated out with the random
    ones, and both are drawn given (ω, φ).

    Args:
        model: the log joint of all coordinates, with `torchngvi.models.GaussianNoise`.
        learned: `torchngvi.models.learned.LearnedNoise` where the residual sd is learned, else None.

    Attributes:
        dim: the number of entries of ω of all factors, and one more where the residual sd is learned.

    >>> from torchngvi.models import GaussianNoise
    >>> X = torch.ones(4, 1, dtype=torch.float64)
    >>> factors = {"a": (X, [0, 0, 1, 1]), "b": (X, [0, 1, 0, 1])}
    >>> model = MultilevelLogJoint(X, [1.0, 2.0, 0.0, 1.0], factors, GaussianNoise(0.5))
    >>> GaussianMultilevel(model).log_joint(torch.zeros(5, 2, dtype=torch.float64)).shape
    torch.Size([5])
    """

    temperature = 1.0
    how = "in closed form"

    def __init__(self, model: MultilevelLogJoint, learned: Learned | None = None) -> None:
        read_instance("model", model, MultilevelLogJoint, "is a mixed model of several factors")
        if learned is not None:
            read_instance("learned", learned, Learned, "is a likelihood whose parameter is learned, or None")
        self.model, self.rows, self.learned = model, model.rows, learned
        rows = self.rows
        self.parameter_prior = None if learned is None else learned.settled(rows.factors[0])
        self.slices = [slice(at.start - rows.bare.dim, at.stop - rows.bare.dim) for at in rows.omegas]
        self.omega_dim = rows.dim - rows.bare.dim
        self.dim = self.omega_dim + (learned is not None)
        w, X = rows.weights, rows.X
        y = torch.where(w > 0, rows.y - rows.offset, 0.0)
        self.centre = linalg.pseudo_solve(X.mT @ (w[:, None] * X), X.mT @ (w * y))
        residual = torch.where(w > 0, y - X @ self.centre, 0.0)
        self.square, self.weight = (w * residual.square()).sum(), w.sum()
        self.gram, self.summed = rows.gram(w, rows.bare), rows.gathered(w * residual, rows.bare.dim)
        self.leaves = Leaves.of(rows, self.gram, self.summed)
        prior = rows.fixed.prior
        self.shift = torch.zeros_like(self.summed)
        self.shift[rows.beta] = prior.force(self.centre)
        self.constant = -float(prior.energy(self.centre))

    @property
    def blocks(self) -> list[tuple[slice, int]]:
        """Where an ω stands of which standard deviations and correlations are the better coordinates."""
        known = zip(self.slices, self.rows.factors, self.model.priors, strict=True)
        return [(at, of.r) for at, of, prior in known if of.r > 1 and isinstance(prior, ScalesPrior)]

    @property
    def cost(self) -> int:
        """Multiplications of a factorisation, about."""
        kinds = self.rows.bare.kinds[-1:] if self.leaves is not None else self.rows.bare.kinds
        return sum(kind.nodes * kind.size * (kind.size + kind.above) ** 2 for kind in kinds)

    def check(self, q: Posterior) -> None:
        """Check that q is over the variance parameters.

        Raises:
            InputError: if their number, the dtype or the device is another.
        """
        checks.posterior(q, self.dim, torch.Size(), self.rows.X)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return every tensor that a value depends on."""
        return self.model.tensors()

    def settings(self) -> tuple[object, ...]:
        """Return the settings of the model, what is learned, and the priors."""
        learned = () if self.learned is None else (self.learned.name, *(self.parameter_prior or ()))
        return (*self.model.settings(), *learned)

    def log_joint(self, theta: Tensor) -> Tensor:
        """Compute log p(y, ω, φ) with all its constants, (*sample, *batch), differentiable once."""
        return InChunks.apply(theta.reshape(-1, self.dim), self).reshape(theta.shape[:-1])

    def chunks(
        self,
        theta: Tensor,  # (S, P)
    ) -> tuple[Tensor, ...]:
        """Split values of the parameters so that not too many matrices are factored at once."""
        size = self.gram.numel() if self.leaves is None else (self.rows.bare.dim - self.rows.root) ** 2
        return theta.split(max(1, _AT_ONCE // size))

    def value(
        self,
        theta: Tensor,  # (S, P)
    ) -> Tensor:
        """Compute log p(y, ω, φ) of all values of the parameters in one go, (S,)."""
        rows, log_sd = self.rows, self.log_sd(theta)
        total = -self.weight * (log_sd + 0.5 * math.log(2 * math.pi)) - 0.5 * torch.exp(-2 * log_sd) * self.square
        for of, at, prior in zip(rows.factors, self.slices, self.model.priors, strict=True):
            omega = theta[:, at]
            total = total + of.n * omega[:, starts(of.r)].sum(-1) - prior.energy(omega)
        if self.learned is not None and self.parameter_prior is not None:
            total = total - self.learned.prior_energy(log_sd, self.parameter_prior)
        added, root, half = self._top(theta)
        # the prior of β has its normaliser in the constant, without which M has that of a Gaussian
        scale = 0.5 * rows.p * math.log(2 * math.pi) + self.constant
        log_det = root.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        return total + scale + added - log_det + 0.5 * half.square().sum(-1)

    def log_sd(
        self,
        theta: Tensor,  # (S, P)
    ) -> Tensor:
        """log σ of the noise, (S,)."""
        if self.learned is not None:
            return theta[:, -1]
        likelihood = self.rows.likelihood
        assert isinstance(likelihood, GaussianNoise)
        return torch.full_like(theta[:, 0], math.log(likelihood.noise))

    def _top(
        self,
        theta: Tensor,  # (S, P)
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What the levels below the root add to the log joint (S,), and of the root T (S, R, R) and T⁻¹c (S, R)."""
        bare = self.rows.bare
        if self.leaves is None:
            root, c = self._factored(theta)
            half, size = bare.solve(root, c), bare.kinds[-1].size
            top = bare.parts(root)[-1].square[:, 0]
            below = bare.log_det(root) - top.diagonal(dim1=-2, dim2=-1).log().sum(-1)
            return 0.5 * half[:, :-size].square().sum(-1) - below, top, half[:, -size:]
        precision = torch.exp(-2 * self.log_sd(theta))
        omegas = self._omegas(theta)
        (leaf,), size = self.rows.arrangement.chain, bare.kinds[-1].size
        taken, linear, added = self.leaves.eliminated(precision, omegas[leaf][:, 0, 0])
        own = bare.parts(self.gram)[-1].square[0]
        M = with_root_penalties(self.rows, precision[:, None, None] * own, omegas) - taken
        root, _ = linalg.cholesky(M)
        c = precision[:, None] * self.summed[-size:] - self.shift[-size:] - linear
        return added, root, torch.linalg.solve_triangular(root, c[..., None], upper=False)[..., 0]

    def _omegas(self, theta: Tensor) -> list[Tensor]:
        """Ω of each factor, (S, r, r)."""
        roots = (root_of(theta[:, at], of.r) for of, at in zip(self.rows.factors, self.slices, strict=True))
        return [W @ W.mT for W in roots]

    def _factored(
        self,
        theta: Tensor,  # (S, P)
    ) -> tuple[Structured, Tensor]:
        """T with M = T Tᵀ, and c, for each value of the parameters."""
        precision = torch.exp(-2 * self.log_sd(theta))[:, None]
        M = with_penalties(self.rows, precision * self.gram, self._omegas(theta))
        return self.rows.bare.cholesky(M)[0], precision * self.summed - self.shift

    @torch.no_grad()
    def fixed(
        self,
        theta: Tensor,  # (S, P)
        generator: torch.Generator,
    ) -> Tensor:
        """Draw β given the data and the parameters, one for each value of these, (S, p)."""
        drawn = []
        p = self.rows.p
        for part in self.chunks(theta):
            _, root, half = self._top(part)
            top, right = root[:, -p:, -p:], half[:, -p:]
            z = torch.randn(right.shape, generator=generator, dtype=torch.float64).to(right)
            drawn.append(torch.linalg.solve_triangular(top.mT, (right + z)[..., None], upper=True)[..., 0])
        return torch.cat(drawn) + self.centre

    @torch.no_grad()
    def effects(
        self,
        theta: Tensor,  # (S, P)
        beta: Tensor,  # (S, p)
        generator: torch.Generator,
    ) -> Tensor:
        """Draw b given the data, the parameters and β, (S, D - p), in the order of θ."""
        drawn = []
        parts = theta.split(max(1, _AT_ONCE // self.gram.numel()))
        for part, fixed in zip(parts, beta.split([len(part) for part in parts]), strict=True):
            root, c = self._factored(part)
            z = torch.randn(c.shape, generator=generator, dtype=torch.float64).to(c)
            half = self.rows.bare.solve(root, c) + z
            top = self.rows.bare.parts(root)[-1].square[:, 0, -self.rows.p :, -self.rows.p :]
            half[:, self.rows.beta] = ((fixed - self.centre)[:, None] @ top)[:, 0]
            drawn.append(self.rows.bare.tsolve(root, half)[:, : self.rows.beta.start])
        return torch.cat(drawn)
