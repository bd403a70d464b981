"""Estimators that use Hessians or curvatures: Bonnet and Price, Gauss-Newton, Hessian-vector products."""

from typing import final

import torch
from torch import Tensor

from torchngvi.arguments import read_size
from torchngvi.derivatives import mean_hessian, mean_hessian_diagonal, mean_hessian_products
from torchngvi.errors import PairError
from torchngvi.expectations.draws import Drawing, Draws
from torchngvi.interfaces import (
    Cost,
    Estimator,
    Expectation,
    Frame,
    Framed,
    LinearTarget,
    Posterior,
    Raw,
    ScalarLikelihood,
    SeparableTarget,
    Sites,
    Target,
    TractableTarget,
)
from torchngvi.numerics import sparse
from torchngvi.numerics.gaussian_integrals import Moments
from torchngvi.numerics.linalg import multiply
from torchngvi.structures import Diagonal
from torchngvi.structures.pattern import Structured

# Monte Carlo for linear predictors: draws of η_n ~ N(e_n, v_n), one each a row
#
#     α_n = mean_s f'(η_ns)     β_n = mean_s f''(η_ns)     η_ns = e_n + √v_n z_ns
#
# (Bonnet 1964; Price 1958).  The draws are of the one-dimensional predictors, independent from row to
# row (local reparametrisation: Kingma, Salimans and Welling 2015), not of θ: the expectation of the
# packet is the same and its variance smaller, because the noise of the rows averages out.  With
# mini-batches and SRVN this is the stochastic SR-VN of Kumar et al. (2025), appendix E.


@final
class MonteCarlo(Drawing):
    """Value, α and β of `Sites` as averages over S draws of each predictor; the prior stays exact.

    All three are unbiased, and noisy, so that steps found by trial are refused.  So they are with `Fixed`
    draws, of whose mean of f the mean of f'' is not the derivative.  Use it to follow
    the papers that draw the predictors; `Quadrature` has no noise.

    Args:
        draws: the number S of antithetic draws, which make α exact for quadratic likelihoods; or draws such as
            `Independent`, `Antithetic`, `Quasi` and `Fixed`, whose dimensions are the rows.

    Raises:
        InputError: if draws is neither, or the number is not positive and even.

    >>> from torchngvi import SRVN, CholeskyGaussian, GeneralizedLinear
    >>> X, y = torch.eye(4), torch.tensor([0.0, 1.0, 1.0, 0.0])
    >>> model, q = GeneralizedLinear(X, y), CholeskyGaussian(4)
    >>> opt = SRVN(q, lr=0.1, estimator=MonteCarlo(2))
    >>> loss = opt.step(model.minibatch([0, 3]))
    """

    needs = LinearTarget

    def __call__(self, q: Posterior, target: Target) -> Expectation:
        """Estimate E_q[ℓ] and its derivative at q, with new draws of the predictors."""
        assert isinstance(target, LinearTarget)
        frame, draws = q.frame(), self.draws.num_samples
        rows = target.marginals(frame)
        eta = rows.mean + rows.variance.sqrt() * self.draws(rows.mean)
        value, sites = target.energy_from(frame, rows, mean_derivatives(rows.likelihood, eta, rows.y))
        return Expectation(value, sites, target.temperature, False, Cost(draws, draws))


def mean_derivatives(
    likelihood: ScalarLikelihood,
    eta: Tensor,  # (S, *batch, N)
    y: Tensor,  # (*batch, N)
) -> Moments:
    """The means of f, f' and f'' over draws of the predictors, with f = -log p(y | η).

    >>> from torchngvi.models import GaussianNoise
    >>> draws, y = torch.tensor([[1.0], [3.0]]), torch.zeros(1)
    >>> mean_derivatives(GaussianNoise(1.0), draws, y)[1:]  # of ½η²
    (tensor([2.]), tensor([1.]))
    """
    eta = eta.requires_grad_()
    with torch.enable_grad():
        energy = likelihood.energy(eta, y)
        (slope,) = torch.autograd.grad(energy.sum(), eta, create_graph=True)
        (curvature,) = torch.autograd.grad(slope.sum(), eta)
    return Moments(*(part.detach().mean(0) for part in (energy, slope, curvature)))


# Monte Carlo from gradients and Hessians: the theorems of Bonnet and Price
#
#     g = E[∇ℓ(θ)]        H = E[∇²ℓ(θ)]
#
# (Bonnet 1964; Price 1958; in this use Opper and Archambeau 2009, and VON of Khan and Rue 2023).


@final
class Hessian(Drawing):
    """g and H as means over S draws: of the least noise, at D Hessian-vector products a draw.

    H has no variance where ℓ is quadratic.  It is positive semi-definite where ℓ is convex, for any number of draws, so
    that a step in `NaturalGaussian` with ρ < 1/γ stays in the cone.  The packet is of θ and needs no frame: H has D²
    numbers for a diagonal covariance too, of which `HessianVector` keeps D.  With `Fixed` draws too, it is not the
    derivative of the mean of ℓ over them, and steps by trial are refused: `Stein` has that derivative.

    Args:
        draws: the number S of antithetic draws, or draws such as `Independent`, `Antithetic`, `Quasi` and `Fixed`.
        chunk: the number of copies of θ, of S times D, at which the log joint is evaluated in one call: it bounds the
            memory.

    Raises:
        InputError: if draws is neither, or the number is not positive and even; if the chunk is below 1; on use, if the
            log joint does not depend on theta.

    >>> import torch
    >>> from torchngvi import CholeskyGaussian, LogJoint
    >>> q, target = CholeskyGaussian(2), LogJoint(lambda theta: -theta[..., 0] * theta[..., 1])
    >>> Hessian(2)(q, target).derivative.H.tolist()
    [[0.0, 1.0], [1.0, 0.0]]
    """

    def __init__(self, draws: Draws | int = 16, *, chunk: int = 256) -> None:
        super().__init__(draws)
        self.chunk = checked_chunk(chunk)

    def __call__(self, q: Posterior, target: Target) -> Expectation:
        """Estimate E_q[ℓ], g and H at q."""
        seen, count = self.see(q, target), self.draws.num_samples
        H = mean_hessian(target, seen.theta, self.chunk)
        return Expectation(
            seen.energy.mean(0), Raw(seen.gradient.mean(0), H), target.temperature, False, Cost(count, count)
        )


def checked_chunk(chunk: int) -> int:
    """Check the number of copies of θ in one call."""
    return read_size("chunk", chunk, "is the number of copies of theta in one call")


# Curvature from the gradients of single data: positive semi-definite, whatever the likelihood
#
#     g = E[∇ℓ(θ)]        H = E[Σ_n ∇log p(y_n|θ) ∇log p(y_n|θ)ᵀ] - E[∇²log p(θ)]
#
# The sum is the empirical Fisher matrix: the expected Hessian where the model is right and q near the
# truth, another matrix elsewhere (Kunstner, Hennig and Balles 2019), so that V is off where the model is;
# the mean is not.  VOGN uses it (Khan et al. 2018; Osawa et al. 2019).


@final
class GaussNewton(Drawing):
    """g and the empirical Fisher matrix as means over S draws; the curvature of the prior is exact.

    Use it where the log likelihood is given datum by datum and H must be positive semi-definite although ℓ is not
    convex, as for neural networks; `Hessian` has the right curvature where the model is wrong.  It evaluates one
    posterior, not a batch.

    Args:
        draws: the number S of antithetic draws, or draws such as `Independent`, `Antithetic`, `Quasi` and `Fixed`.
        chunk: the number of draws whose gradients per datum, (N, D) each, are held at once.

    Raises:
        InputError: if draws is neither, or the number is not positive and even; if the chunk is below 1.
        PairError: on use, if q is a batch of posteriors.

    >>> import torch
    >>> from torchngvi import CholeskyGaussian
    >>> from torchngvi.models import PerDatum
    >>> y = torch.tensor([1.0, -1.0])
    >>> target = PerDatum(lambda theta: y * theta, lambda theta: -0.5 * theta.square().sum(-1))
    >>> GaussNewton(2)(CholeskyGaussian(1), target).derivative.H.item()  # 1² + 1² + 1
    3.0
    """

    needs = SeparableTarget
    unbiased = False

    def __init__(self, draws: Draws | int = 16, *, chunk: int = 16) -> None:
        super().__init__(draws)
        self.chunk = checked_chunk(chunk)

    def __call__(self, q: Posterior, target: Target) -> Expectation:
        """Estimate E_q[ℓ], g and H at q."""
        assert isinstance(target, SeparableTarget)
        if q.batch_shape:
            raise PairError(
                f"GaussNewton evaluates one posterior; got a batch of {tuple(q.batch_shape)}. Use Hessian()."
            )
        seen, count = self.see(q, target), self.draws.num_samples
        fisher = sum(_fisher(target, theta) for theta in seen.theta.split(self.chunk)) / count
        H = fisher + mean_hessian(target.prior, seen.theta, 256)
        packet = Raw(seen.gradient.mean(0), H)
        return Expectation(seen.energy.mean(0), packet, target.temperature, False, Cost(count, 0))


def _fisher(target: SeparableTarget, theta: Tensor) -> Tensor:
    """Σ_s Σ_n ∇log p(y_n|θ_s) ∇log p(y_n|θ_s)ᵀ, (D, D)."""
    with torch.enable_grad():
        jacobian = torch.func.vmap(torch.func.jacrev(lambda one: target.terms(one[None])[0]))(theta)
    flat = jacobian.detach().flatten(0, 1)
    return flat.mT @ flat


# Monte Carlo from gradients and Hessian-vector products with the columns of the root
#
#     a = E[Cᵀ∇ℓ(θ)]        W = E[Cᵀ(∇²ℓ(θ) C)]
#
# Bonnet and Price as in `Hessian`, straight in the frame: no curvature in θ is whitened afterwards, whose
# entries may differ by many orders of magnitude where those of W are near γ.


@final
class HessianVector(Drawing):
    """a and W as means over S draws, from D Hessian-vector products a draw.

    They are the same numbers as those of `Hessian` in exact arithmetic.  Use it for a diagonal covariance, where
    no D x D matrix is formed and the memory is that of ``chunk`` copies of θ, and where the entries of H differ by many
    orders of magnitude.

    Args:
        draws: the number S of antithetic draws, or draws such as `Independent`, `Antithetic`, `Quasi` and `Fixed`.
        chunk: the number of copies of θ, of S times D, at which the log joint is evaluated in one call: it bounds the
            memory.

    Raises:
        InputError: if draws is neither, or the number is not positive and even; if the chunk is below 1; on use, if the
            log joint does not depend on theta.

    >>> import torch
    >>> from torchngvi import CholeskyGaussian, LogJoint
    >>> q, target = CholeskyGaussian(2, scale=3.0), LogJoint(lambda theta: -theta[..., 0] * theta[..., 1])
    >>> HessianVector(2)(q, target).derivative.W.tolist()
    [[0.0, 9.0], [9.0, 0.0]]
    """

    def __init__(self, draws: Draws | int = 16, *, chunk: int = 256) -> None:
        super().__init__(draws)
        self.chunk = checked_chunk(chunk)

    def __call__(self, q: Posterior, target: Target) -> Expectation:
        """Estimate E_q[ℓ], a and W at q."""
        seen, count = self.see(q, target), self.draws.num_samples
        packet = Framed(seen.pulled.mean(0), self._curvature(q, target, seen.theta))
        return Expectation(seen.energy.mean(0), packet, target.temperature, False, Cost(count, count))

    def _curvature(
        self,
        q: Posterior,
        target: Target,
        theta: Tensor,  # (S, *batch, D)
    ) -> Structured:
        """W; of a diagonal structure column by column, of which one entry each is kept."""
        frame, structure = q.frame(), q.structure
        if structure.widest == 1:
            diagonal = mean_hessian_diagonal(target, theta, structure.diagonal(frame.root), self.chunk)
            return structure.with_diagonal(torch.zeros_like(frame.root), diagonal)
        columns = frame.dense().movedim(-1, 0)
        W = frame.pull(mean_hessian_products(target, theta, columns, self.chunk)).movedim(0, -1)
        return structure.from_dense(0.5 * (W + W.mT))


# Expectations whose value torch can differentiate: a and W from one backward pass


@final
class Autograd(Estimator):
    """E_q[ℓ] as the target computes it, differentiated by one backward pass with respect to the probes of q.

    By Price's theorem in the frame, ∂/∂p = Cᵀg = a and ∂/∂R = CᵀHC, of which the lower part is read: that of CᵀG is
    right also where G has reached the root through a triangular operator of the target.  Use it where the
    derivative should come from autograd, for instance to check the one that a target gives itself, which `Quadrature`
    takes.

    >>> from torchngvi import CholeskyGaussian, GeneralizedLinear
    >>> from torchngvi.expectations import Quadrature
    >>> q, model = CholeskyGaussian(2), GeneralizedLinear(torch.eye(2), [0.0, 1.0])
    >>> packet = Autograd()(q, model).derivative
    >>> torch.allclose(packet.a, Quadrature()(q, model).derivative.framed(q.frame()).a, atol=1e-6)
    True
    """

    comparable = True
    needs = TractableTarget

    def __call__(self, q: Posterior, target: Target) -> Expectation:
        """Evaluate E_q[ℓ] at q and differentiate it."""
        assert isinstance(target, TractableTarget)
        with torch.enable_grad():
            value = target.expected_energy(q.probed())[0]
            a, M = torch.autograd.grad(value.sum(), (q.mean_probe, q.root_probe))
        packet = Framed(a, q.structure.one_sided(M))
        return Expectation(value.detach(), packet, target.temperature, target.comparable, Cost(1, 0))


# Bonnet's and Price's theorems for linear predictors, from joint draws of θ; the prior stays exact
#
#     θ_s = m + C z_s,  η_s = Xθ_s:    g = Xᵀ mean_s f'(η_s) + Λ(m - m₀)     H = Xᵀ diag(mean_s f''(η_s)) X + Λ
#
# (Wu and Gardner 2024, Eq 11, with g and H from the same draws.)  They are what `Hessian` gives on the log joint, up
# to the prior's share of g, at the cost of one XᵀDX in the place of S D Hessian-vector products.  H ⪰ Λ where f
# is convex, and H is exact where f is quadratic.


@final
class BonnetPrice(Drawing):
    """g and H of a generalised linear model as means over S draws of θ.

    Use it to follow the stochastic natural-gradient VI of the paper, in which the draws are of θ; `MonteCarlo`
    draws each predictor for itself, with less noise, and `Quadrature` does without draws.  The likelihood must be twice
    differentiable: where it has a kink, its mean curvature cannot be had from draws.

    Args:
        draws: the number S of antithetic draws, or draws such as `Independent`, `Antithetic`, `Quasi` and `Fixed`.

    Raises:
        InputError: if draws is neither, or the number is not positive and even.

    >>> from torchngvi import VN, GeneralizedLinear, NaturalGaussian
    >>> from torchngvi.expectations import Independent
    >>> X, y = torch.eye(4), torch.tensor([0.0, 1.0, 1.0, 0.0])
    >>> model, q = GeneralizedLinear(X, y), NaturalGaussian(4)
    >>> opt = VN(q, lr=0.1, estimator=BonnetPrice(Independent(10)))
    >>> loss = opt.step(model.minibatch([0, 3]))
    """

    needs = LinearTarget

    def __call__(self, q: Posterior, target: Target) -> Expectation:
        """Estimate E_q[ℓ] and its derivative at q with new draws of θ."""
        assert isinstance(target, LinearTarget)
        frame, count = q.frame(), self.draws.num_samples
        noise = frame.push(self.draws(q.mean_probe.detach()))
        # of the marginals only the means are needed, and at the point m they are for nothing
        rows = target.marginals(Frame(frame.mean, torch.zeros_like(frame.mean), Diagonal(q.dim)))
        moments = mean_derivatives(rows.likelihood, rows.mean + _predictor(rows.rows, noise), rows.y)
        total, sites = target.energy_from(frame, rows, moments)
        packet: Sites | Raw
        if q.structure.widest == q.dim:
            packet = sites.raw()
        else:  # a pattern with fewer entries needs no D x D matrix
            packet = sites if sparse.is_sparse(sites.rows) else sites._replace(projected=frame.rows(sites.rows))
        return Expectation(total, packet, target.temperature, False, Cost(count, count))


def _predictor(rows: Tensor, theta: Tensor) -> Tensor:
    """Xθ, (S, *batch, N)."""
    if sparse.is_sparse(rows):
        return (rows @ theta.mT).mT
    return multiply(rows, theta)
