"""A bound of L(q) - L*, in nats, that is a proof: how far q is from the best Gaussian under a log-concave model.

Where ℓ - ½θᵀΛθ is convex, so is L in (m, C), with C lower triangular in the pattern of q, and L is at least as curved
there as the quadratic of Λ.  With g and H the mean gradient and Hessian, Λ = UUᵀ, U upper triangular, and
G = tril(HC) - γ diag(1/C_jj), from any q

    L - L* ≤ ½|U⁻¹g|² + ½|tril(U⁻¹G)|²                                                                        (prior)

This knows of no curvature but the prior's.  Rows whose energy has |f'''| ≤ f'' (logistic, Poisson, normal, negative
binomial) keep a share of theirs along any line: E f''(η + th)h² ≥ e^(-tρ) E f''h² by Jensen's inequality, with
ρ² ≤ E f''h⁴/E f''h².  With ρ ≤ Kn for all rows and all directions of length n in the Hessian of L, with K ≥ 2/√γ for
log det C, and with the Newton decrement ν,

    Kν < 1:    L - L* ≤ (Kν + (1 - Kν) log(1 - Kν))/K²  →  ½ν²                                                (local)

Rows may be left out of the curvature, since their energies are convex: then the largest K is smaller, and ν larger.
"""

import copy
import math
from typing import NamedTuple, Self

import torch
from torch import Tensor

from torchngvi.errors import InputError
from torchngvi.expectations import Quadrature
from torchngvi.interfaces import Framed, LinearTarget, Posterior, Prior, Target, TractableTarget
from torchngvi.interfaces.targets import AdditiveTractable
from torchngvi.models.log_joint import as_target, read_posterior
from torchngvi.numerics import sparse
from torchngvi.numerics.arrays import tracked
from torchngvi.numerics.gaussian_integrals import row_constants
from torchngvi.posteriors import CholeskyGaussian, DiagonalGaussian
from torchngvi.posteriors.gaussian import Gaussian
from torchngvi.rules.root_system import Direction, conjugate_gradients, hessian, still_solved
from torchngvi.structures import FullAlgebra
from torchngvi.structures.pattern import Structured

_SHARES = (1.0, 0.97, 0.92, 0.85, 0.75, 0.65, 0.5, 0.35, 0.25, 0.15, 0.1, 0.05)  # of the rows, whose curvature is kept


class Certificate(NamedTuple):
    """How far q is from the best Gaussian of its family, in nats of the objective.

    Attributes:
        bound: L(q) - L* is at most this; infinite where nothing is proved.
        about: half the squared Newton decrement, an estimate of the same, which is no proof; not a number where it is
            not known.
        kind: "local" by the curvature of the data, "prior" by that of the prior alone, "rounding" where L itself
            resolves no less, "none" where nothing is proved.
        reason: why nothing is, or how it was proved.

    >>> str(Certificate(1e-9, 9e-10, "local", ""))
    'At most 1e-09 nats above the best Gaussian of its family, about 9e-10.'
    """

    bound: float
    about: float
    kind: str
    reason: str

    @classmethod
    def none(cls, reason: str) -> Self:
        """Say that nothing is proved, and why."""
        return cls(math.inf, math.nan, "none", reason)

    def __str__(self) -> str:
        if self.kind == "none":
            return f"No certificate: {self.reason}."
        if self.kind == "rounding":
            return f"The best Gaussian of its family, up to the rounding of the objective, {self.bound:.1g} nats."
        about = "" if math.isnan(self.about) else f", about {self.about:.2g}"
        loose = ", by the curvature of the prior alone, which may be thousands of times too large"
        loose *= self.kind == "prior"
        return f"At most {self.bound:.2g} nats above the best Gaussian of its family{about}{loose}."


@tracked
def certificate(q: Posterior, target: Target) -> Certificate:
    """Bound how far the objective at q is above its least value over the Gaussians of q's family: a proof, at any q.

    Use it where "converged" is not enough: it holds for a q of any origin, fitted or not, and needs no optimum.
    The objective is the negative ELBO, in nats, so that the ELBO at q is at most so much below the largest one.  It
    says nothing of how far that Gaussian is from the posterior, which is what a `Verdict` is about.  It costs an
    expectation, some products with the Hessian and factorisations of a D by D matrix; everything is in float64.

    Args:
        q: a Gaussian, without batch dimensions, dense, diagonal or in blocks.
        target: a model that is log-concave and knows its expectations, such as a `torchngvi.GeneralizedLinear`, or a
            softmax regression of at most three classes, or a sparse Gaussian process of GPyTorch given its
            hyper-parameters; of the last two the bound is of the objective as summed over their nodes.

    Returns:
        The certificate; for other targets and posteriors one of the kind "none", with the reason.

    Raises:
        InputError: a q of another size than the model, or a model of a batch.

    >>> from torchngvi import CholeskyGaussian, GeneralizedLinear, fit
    >>> model = GeneralizedLinear(torch.tensor([[0.0], [1.0], [2.0]]).double(), [0.0, 1.0, 1.0])
    >>> q = CholeskyGaussian(1, dtype=torch.float64)
    >>> certificate(q, model).kind  # far away
    'prior'
    >>> result = fit(q, model, tolerance=1e-3, progress=False)
    >>> bool(certificate(q, model).bound < 1e-6)
    True
    """
    q, target = read_posterior("certificate", q, target), as_target(target)
    why = _unfit(q, target)
    if why:
        return Certificate.none(why)
    assert isinstance(q, Gaussian)
    assert isinstance(target, TractableTarget)
    here = _Here.of(q, target)
    prior = None if here is None else Curvature.of(here.prior, here.structure)
    if here is None or prior is None:
        return Certificate.none("the covariance of q or of the prior is singular, or infinite, to rounding")
    bounds = {"prior": here.by_prior(prior)}
    nu2 = here.decrement2(here.target, prior)[1] if here.target.curved else math.nan
    if isinstance(target, LinearTarget) and here.target.likelihood.self_concordant:  # type: ignore[attr-defined]
        bounds["local"] = _by_rows(here, 0.99 * math.sqrt(max(nu2, 0.0)))
    kind = min(bounds, key=lambda name: bounds[name])
    if not math.isfinite(bounds[kind]):
        return Certificate.none("the objective or its gradient is not finite at q")
    if bounds[kind] <= here.floor:
        return Certificate(here.floor, 0.5 * nu2, "rounding", "by an evaluation at q")
    return Certificate(bounds[kind], 0.5 * nu2, kind, "by an evaluation at q")


def _unfit(q: Posterior, target: Target) -> str:
    """Why nothing can be proved, or nothing."""
    named = type(getattr(target, "likelihood", target)).__name__
    additive = target if isinstance(target, AdditiveTractable) else None
    if not isinstance(target, TractableTarget) or not (additive.convex if additive else target.beside):
        return f"{named} is not known to be log-concave with expectations that are exact, so that L may not be convex"
    if target.processes is not None:
        return "its rows are spread over processes; ask for that of a model of all rows"
    if not target.exact:
        return (
            f"the expectations of {named} are right to few digits, as sums over Sobol points are (softmax regression "
            "of more than three classes), so that its best Gaussian is another one than that of the model"
        )
    if not target.comparable:
        return "the objective of a mini-batch is another one than that of all rows"
    if not isinstance(q, Gaussian) or not isinstance(q.structure, FullAlgebra):
        return "q is no Gaussian that is dense, diagonal or in blocks"
    if q.batch_shape:
        return f"q is a batch {tuple(q.batch_shape)}; ask for one member"
    if target.temperature <= 0:
        return "at the temperature 0 there is no best Gaussian"
    if isinstance(target, LinearTarget) and sparse.is_sparse(target.X):  # type: ignore[attr-defined]
        return "the design is sparse; pass X.to_dense()"
    if additive and not additive.prior_alone:
        return "a part of the model beside data and prior may not be convex"
    return ""


class Curvature(NamedTuple):
    """A symmetric matrix M below the Hessian of L in the mean and in each column of C, factored as M = LᵀL."""

    mean: Tensor  # L of all of M, lower triangular, (D, D)
    root: Structured  # the inverse of the L of M in the pattern of q
    structure: FullAlgebra

    @classmethod
    def of(cls, M: Tensor, structure: FullAlgebra) -> "Curvature | None":
        """Factor a matrix (D, D); None where rounding has made it indefinite."""
        flipped, info = torch.linalg.cholesky_ex(M.flip(0, 1))
        part, ok = structure.reverse_cholesky(structure.from_dense(M))
        if bool(info) or not bool(ok):
            return None
        return cls(flipped.flip(0, 1).mT, structure.inverse(part), structure)

    def squares(self, g: Tensor, G: Structured) -> tuple[float, float]:
        """|U⁻¹g|² and |tril(U⁻¹G)|², U = Lᵀ."""
        mean = torch.linalg.solve_triangular(self.mean.mT, g[:, None], upper=True)
        root = self.structure.tril(self.structure.matmul(self.structure.transpose(self.root), G))
        return float(mean.square().sum()), float(root.square().sum())


class _Here(NamedTuple):
    """A q in float64 with the packet of its target."""

    q: Gaussian
    target: TractableTarget
    structure: FullAlgebra
    g: Tensor  # (D,)
    H: Tensor  # (D, D)
    C: Tensor  # dense, (D, D)
    prior: Tensor  # γΛ, (D, D)
    diagonal: bool  # whether Λ is
    floor: float  # rounding of L, in nats

    @classmethod
    def of(cls, q: Gaussian, target: TractableTarget) -> "_Here | None":
        """Evaluate at q in float64, with C lower triangular; None where the covariance is singular."""
        with torch.no_grad():
            model, prior = target, target.beside
            if isinstance(target, AdditiveTractable):
                model = target.to(torch.float64) if target.prior.mean.dtype != torch.float64 else target  # type: ignore[attr-defined]
                prior = model.prior
            elif prior is not None and prior.precision.shape[-1] != q.dim:
                raise InputError(f"certificate got a q of D = {q.dim} for a model of {prior.precision.shape[-1]}.")
            mean = q.mean.to(torch.float64)
            own: Gaussian
            if q.structure.widest == 1:
                own = DiagonalGaussian(q.dim, mean=mean, scale=q.stddev.to(torch.float64), dtype=torch.float64)
            else:
                C, info = torch.linalg.cholesky_ex(q.covariance.to(torch.float64))
                if bool(info) or not bool(C.isfinite().all()):
                    return None
                own = CholeskyGaussian(q.dim, mean=mean, scale=C, structure=q.structure, dtype=torch.float64)
            own = own.to(q.mean.device)
            if isinstance(model, AdditiveTractable):
                model.check(own)
            value, derivative = model.expected_energy(own.frame())
            assert prior is not None
            assert not isinstance(derivative, Framed)  # of a target that knows its expectations
            raw = derivative.raw()
            gamma, diagonal = model.temperature, isinstance(prior, Prior)
            full = prior.precision.expand(q.dim).diag() if diagonal else prior.precision
            size = abs(float(value)) + abs(gamma * float(own.entropy())) + float(len(getattr(model, "X", ())))
            structure = own.structure
            assert isinstance(structure, FullAlgebra)
            return cls(own, model, structure, raw.g, raw.H, own.frame().dense(), gamma * full, diagonal, 8e-16 * size)

    def slope(self) -> Structured:
        """G = tril(HC) - γ diag(1/C_jj), in the pattern of q."""
        G = self.H @ self.C
        return self.structure.tril(self.structure.from_dense(G - (self.target.temperature / self.C.diagonal()).diag()))

    def by_prior(self, below: Curvature) -> float:
        """The bound by the curvature of the prior alone; of a diagonal one with log det C as it is."""
        if not self.diagonal:
            return 0.5 * sum(below.squares(self.g, self.slope()))
        lam, gamma, c = self.prior.diagonal(), self.target.temperature, self.C.diagonal()
        off = self.structure.to_dense(self.slope()).tril(-1)
        a = (self.H * self.C.mT).sum(-1) - lam * c  # (HC)_jj - λ_j C_jj
        root = (a.square() + 4 * gamma * lam).sqrt()
        best = torch.where(a > 0, 2 * gamma / (a + root), (root - a) / (2 * lam))
        fall = a * (c - best) + 0.5 * lam * (c.square() - best.square()) - gamma * (c / best).log()
        return float(0.5 * (self.g.square() / lam).sum() + 0.5 * (off.square() / lam[:, None]).sum() + fall.sum())

    def decrement2(self, target: TractableTarget, below: Curvature, most: int = 20) -> tuple[float, float]:
        """A bound of ∇ᵀH⁻¹∇ from above, H the Hessian of this target and ∇ the gradient here, and an estimate."""
        q, structure, frame = self.q, self.structure, self.q.frame()
        with torch.no_grad():
            local = q.local(Quadrature()(q, self.target))
            e = Quadrature()(q, target)
            u = Direction(local.a, structure.tril(local.P))
            of = q.local(e)
            product = hessian(e, of, frame, exact=True)
            x, _ = conjugate_gradients(
                product, still_solved(e, of, frame), u, torch.full_like(e.value, 1e-7), structure, most
            )
            s = u.plus(torch.full_like(e.value, -1.0), product(x), structure)
            about = float(x.dot(u, structure) + x.dot(s, structure))  # xᵀHx + 2xᵀs
            inverse = structure.inverse(structure.from_dense(self.C))
            pulled = structure.transpose(inverse)
            left = below.squares(structure.tmv(inverse, s.delta), structure.tril(structure.matmul(pulled, s.T)))
        return about + sum(left), about


def _by_rows(here: _Here, least: float) -> float:
    """The least of the local bounds over subsets of the rows; ν of all rows is about ``least``."""
    target, gamma = here.target, here.target.temperature
    assert isinstance(target, LinearTarget)
    rows = target.marginals(here.q.frame())
    constants = row_constants(target.likelihood, rows.mean, rows.variance.sqrt(), rows.y, rows.weights)  # type: ignore[attr-defined]
    X, best, order = rows.rows, math.inf, None
    for share in _SHARES:
        keep = constants.known
        if order is not None:
            keep = torch.zeros_like(keep).index_fill(0, order[: math.ceil(share * int(constants.known.sum()))], True)
        kappa = torch.where(keep, constants.least, 0.0)
        below = Curvature.of(here.prior + (X * kappa[:, None]).mT @ X, here.structure)
        if below is None:
            continue
        leverage = torch.linalg.solve_triangular(below.mean.mT, X.mT, upper=True).square().sum(0)
        K_rows = torch.where(keep, constants.local(leverage), 0.0)
        K = max(float(K_rows.max()) * (1 + 1e-6), 2 / math.sqrt(gamma))
        if order is None:
            order = torch.where(keep, K_rows, math.inf).argsort()
        error = 1e-12 * float((leverage.sqrt() * rows.weights * constants.scale).sum())  # of expectations by row
        nu = math.sqrt(sum(below.squares(here.g, here.slope()))) + error
        best = min(best, local_bound(K, nu))
        if K * least < 1:  # which no ν of a subset is below
            part = copy.copy(target)
            part.weights = target.weights * keep  # type: ignore[attr-defined]
            nu = math.sqrt(max(here.decrement2(part, below)[0], 0.0)) + error
            best = min(best, local_bound(K, nu))
    return best


def local_bound(K: float, nu: float) -> float:
    """(Kν + (1 - Kν) log(1 - Kν))/K², infinite from Kν = 1 on."""
    t = K * nu
    if not t < 1:
        return math.inf
    series = t * t * (0.5 + t / 6 + t * t / 12 + t**3 / 20)  # the next terms are below rounding for t < 1e-3
    return (series * (1 + 1e-9) if t < 1e-3 else t + (1 - t) * math.log1p(-t)) / K**2
