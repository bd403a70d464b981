"""Estimators by draws: with Hessians or curvatures, reparametrised, and by score functions."""

from collections.abc import Callable
from typing import final

import torch
from torch import Tensor

from torchngvi.arguments import read_callable, read_instance, read_size
from torchngvi.derivatives import mean_hessian, mean_hessian_diagonal, mean_hessian_products
from torchngvi.errors import InputError, PairError
from torchngvi.expectations.draws import Drawing, Draws, Fixed, Independent, Seen
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
from torchngvi.structures import Diagonal, Forest
from torchngvi.structures.forest import Part
from torchngvi.structures.pattern import Structured, is_whole


@final
class MonteCarlo(Drawing):
    """Value, α and β of `Sites` as averages over S draws of each predictor; the prior stays exact.

        α_n = mean_s f'(η_ns)     β_n = mean_s f''(η_ns)     η_ns = e_n + √v_n z_ns

    (Bonnet 1964; Price 1958).  The draws are of the one-dimensional predictors, independent from row to row (local
    reparametrisation: Kingma, Salimans and Welling 2015), not of θ, so that the noise of the rows averages out; with
    SRVN it is the stochastic SR-VN of Kumar et al. (2025), appendix E.  All three are unbiased, and noisy, so that
    steps found by trial are refused.  So they are with `Fixed` draws, of whose mean of f the mean of f'' is not the
    derivative.  Use it to follow the papers that draw the predictors; `Quadrature` has no noise.

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
    """The means of f, f' and f'' over draws of the predictors, with f = -log p(y | η)."""
    eta = eta.requires_grad_()
    with torch.enable_grad():
        energy = likelihood.energy(eta, y)
        (slope,) = torch.autograd.grad(energy.sum(), eta, create_graph=True)
        (curvature,) = torch.autograd.grad(slope.sum(), eta)
    return Moments(*(part.detach().mean(0) for part in (energy, slope, curvature)))


@final
class Hessian(Drawing):
    """g and H as means over S draws: of the least noise, at D Hessian-vector products a draw.

        g = E[∇ℓ(θ)]        H = E[∇²ℓ(θ)]

    (Bonnet 1964; Price 1958; in this use Opper and Archambeau 2009, and VON of Khan and Rue 2023).  H has no variance
    where ℓ is quadratic.  It is positive semi-definite where ℓ is convex, for any number of draws, so that a step in
    `NaturalGaussian` with ρ < 1/γ stays in the cone.  The packet is of θ and needs no frame: H has D² numbers for a
    diagonal covariance too, of which `HessianVector` keeps D.  With `Fixed` draws too, it is not the derivative of the
    mean of ℓ over them, and steps by trial are refused: `Stein` has that derivative.

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


@final
class GaussNewton(Drawing):
    """g and the empirical Fisher matrix as means over S draws; the curvature of the prior is exact.

        g = E[∇ℓ(θ)]        H = E[Σ_n ∇log p(y_n|θ) ∇log p(y_n|θ)ᵀ] - E[∇²log p(θ)]

    The sum is the expected Hessian where the model is right and q near the truth, and another matrix elsewhere
    (Kunstner, Hennig and Balles 2019), so that V is off where the model is; the mean is not.  Use it, as VOGN does
    (Khan et al. 2018; Osawa et al. 2019), where the log likelihood is given datum by datum and H must be positive
    semi-definite although ℓ is not convex, as for neural networks; `Hessian` has the right curvature where the model is
    wrong.  It evaluates one posterior, not a batch.

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


@final
class HessianVector(Drawing):
    """a and W as means over S draws, from D Hessian-vector products a draw.

        a = E[Cᵀ∇ℓ(θ)]        W = E[Cᵀ(∇²ℓ(θ) C)]

    They are the same numbers as those of `Hessian` in exact arithmetic, straight in the frame.  Use it for a diagonal
    covariance, where no D x D matrix is formed and the memory is that of ``chunk`` copies of θ, and where the entries
    of H differ by many orders of magnitude.

    Args:
        draws, chunk: as in `Hessian`.

    Raises:
        InputError: as `Hessian` does.

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


@final
class BonnetPrice(Drawing):
    """g and H of a generalised linear model as means over S draws of θ.

        θ_s = m + C z_s,  η_s = Xθ_s:    g = Xᵀ mean_s f'(η_s) + Λ(m - m₀)     H = Xᵀ diag(mean_s f''(η_s)) X + Λ

    (Wu and Gardner 2024, Eq 11, with g and H from the same draws), at the cost of one XᵀDX in the place of the S D
    Hessian-vector products of `Hessian`; the prior stays exact.  Use it to follow the stochastic natural-gradient VI of
    the paper, in which the draws are of θ; `MonteCarlo` draws each predictor for itself, with less noise, and
    `Quadrature` does without draws.  The likelihood must be twice differentiable: where it has a kink, its mean
    curvature cannot be had from draws.

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


# ------------------------------------------------------------------------------------ reparametrised, and by scores


class _FromGradients(Drawing):
    """The estimators from gradients alone, which differ in what they average of E[r zᵀ] and in its residual r."""

    derives_value = True
    _lands: bool  # r = Cᵀ∇ℓ - γz, which is 0 where q is the posterior, and not Cᵀ∇ℓ
    _both: bool  # the symmetric part of r zᵀ, and not the triangle that belongs to the root

    def __call__(self, q: Posterior, target: Target) -> Expectation:
        """Estimate E_q[ℓ], a and W at q, from the gradients at the draws."""
        seen, gamma = self.see(q, target), target.temperature
        energy, z = seen.energy, seen.z
        if self.comparable:
            packet = self.derivative_of_mean(q, seen)
        else:
            force = (seen.pulled - gamma * z if self._lands else seen.pulled) / len(z)
            a, W = force.sum(0), (q.sym_outer if self._both else q.one_triangle)(force, z)
            packet = Framed(a, W + gamma * q.structure.eye(a) if self._lands else W)
            if self._lands and not self._both:  # as published, the value too has the control variate
                energy = energy - 0.5 * gamma * (q.structure.dot(z, z) - q.structure.total_dim)
        comparable, cost = self.comparable and target.comparable, Cost(self.draws.num_samples, 0)
        return Expectation(energy.mean(0), packet, gamma, comparable, cost)


@final
class Stein(_FromGradients):
    """a and W from gradients at S draws; the default for a log joint that is only a function.

        r = Cᵀ∇ℓ(m + C z) - γz        a = E[r]        W = γI + E[r zᵀ]

    (Lin, Khan and Schmidt 2019; Roeder, Wu and Duvenaud 2017).  γz is a control variate: where q is the exact Gaussian
    posterior, r = 0 for each draw, and neither a nor W has any variance.  Of E[r zᵀ] the symmetric part is taken, which
    has about half the variance of a triangle of it.  With `Fixed` draws a and W are the exact derivative of the mean of
    ℓ over them, steps can be found by trial, and the residual makes no difference: such draws have mean 0 and
    covariance I.  In natural coordinates that mean is a function of (S m, S) through the root T⁻ᵀ, S = T Tᵀ.

    Args:
        draws: the number S of antithetic draws, which make a exact for quadratic ℓ; or draws such as `Independent`,
            `Antithetic`, `Quasi` and `Fixed`.

    Raises:
        InputError: if draws is neither, or the number is not positive and even; on use, if the log joint does not
            depend on theta, or fixed draws are fewer than 2D for a full covariance.

    >>> import torch
    >>> from torchngvi import VN, CholeskyGaussian, Stein
    >>> from torchngvi.expectations import Fixed
    >>> q = CholeskyGaussian(1, dtype=torch.float64)
    >>> opt = VN(q, estimator=Stein(Fixed(64)))  # no learning rate
    >>> for _ in range(10):
    ...     loss = opt.step(lambda theta: -2 * (theta - 3).square().sum(-1))
    >>> round(q.mean.item(), 9), round(q.variance.item(), 9)
    (3.0, 0.25)
    """

    _lands, _both = True, True


@final
class LeastSquaresStein(Drawing):
    """a and W from gradients at S > D draws, exact for a quadratic ℓ whatever the draws.

        Cᵀ∇ℓ(m + C z_s) ≈ a + W z_s,   s = 1 .. S,   by least squares

    In place of the moments of the draws, which are I only on average, stand those they have (Salimans and Knowles 2013;
    the quadratic as a control variate: Geffner and Domke 2020).  Where ℓ is not quadratic, value, a and W are
    consistent with a bias of order 1/S.  With S ≥ 4D antithetic draws W has a fraction of the noise of `Stein` far from
    the optimum and as much at it, and the value a fraction everywhere; with S barely above 2D there is more noise, not
    less.  The regression has D² coefficients for a diagonal covariance too, where `Stein` keeps D numbers.

    Args:
        draws: the number S of antithetic draws, S ≥ 2D; or draws, `Independent` or `Quasi` with S > D, `Antithetic`
            or `Fixed` with S ≥ 2D.

    Raises:
        InputError: if draws is neither, or the number is not positive and even; on use, if there are too few draws for
            D, or the log joint does not depend on theta.

    >>> from torchngvi import CholeskyGaussian, LogJoint
    >>> q, target = CholeskyGaussian(1, dtype=torch.float64), LogJoint(lambda theta: -2 * (theta - 3).square().sum(-1))
    >>> e = LeastSquaresStein(2)(q, target)
    >>> round(e.value.item(), 9), round(e.derivative.a.item(), 9), round(e.derivative.W.item(), 9)
    (20.0, -12.0, 4.0)
    """

    unbiased = False

    def __call__(self, q: Posterior, target: Target) -> Expectation:
        """Estimate E_q[ℓ], a and W at q by a regression of the gradients on the draws."""
        least = 2 * q.dim if self.draws.mirrored else q.dim + 1  # mirror images add nothing to the span of z
        if self.draws.num_samples < least:
            kind = "antithetic draws" if self.draws.mirrored else "draws"
            raise InputError(
                f"LeastSquaresStein needs at least {least} {kind} in {q.dim} dimensions; got {self.draws.num_samples}. "
                "Use more, or Stein."
            )
        seen = self.see(q, target)
        z, pulled = seen.z.movedim(0, -2), seen.pulled.movedim(0, -2)  # (*batch, S, D)
        design = torch.cat([torch.ones_like(z[..., :1]), z], -1)
        basis, triangle = torch.linalg.qr(design)
        fit = torch.linalg.solve_triangular(triangle, basis.mT @ pulled, upper=True)
        a, W = fit[..., 0, :], 0.5 * (fit[..., 1:, :] + fit[..., 1:, :].mT)
        # ℓ less its quadratic part, whose mean is ½ tr W
        quadratic = (z @ a[..., None])[..., 0] + 0.5 * (z @ W * z).sum(-1)
        value = (seen.energy.movedim(0, -1) - quadratic).mean(-1) + 0.5 * W.diagonal(dim1=-2, dim2=-1).sum(-1)
        packet = Framed(a, q.structure.from_dense(W))
        return Expectation(value, packet, target.temperature, False, Cost(self.draws.num_samples, 0))


@final
class ClosedEntropyStein(_FromGradients):
    """a and W from gradients at S draws, without the control variate of `Stein`.

        a = E[Cᵀ∇ℓ]        W = E[Cᵀ∇ℓ zᵀ]

    (the reparametrisation gradient of Kingma and Welling 2014; CFE in Kim, Ma and Gardner 2024, Definition 4).  Its
    noise does not vanish at the optimum.  Use it to compare with the gradient estimator of most black-box VI, or where
    q cannot fit the target well; neither is always ahead there (section 3 of the last paper).

    Args:
        draws: as in `Stein`, which it equals with fixed draws.

    Raises:
        InputError: as `Stein` does.

    >>> import torch
    >>> from torchngvi import CholeskyGaussian, LogJoint
    >>> q, target = CholeskyGaussian(2), LogJoint(lambda theta: -theta.sum(-1))
    >>> ClosedEntropyStein(4)(q, target).derivative.a.tolist()
    [1.0, 1.0]
    """

    _lands, _both = False, True


# -------------------------------------------------------------------------------- in the root, and from values


@final
class Reparametrized(_FromGradients):
    """a and W from gradients at S draws, taking of E[Cᵀ∇ℓ zᵀ] the triangle that belongs to the root.

        a = E[Cᵀ∇ℓ]        W = M + Mᵀ on the triangle of the root, M = tril½ E[Cᵀ∇ℓ zᵀ]

    It is what backpropagation through a Cholesky factor gives (Wu and Gardner 2024, Algorithm 1; Kim, Ma and Gardner
    2024, Definition 4).  W is unbiased and symmetric, but not positive semi-definite, not even where ℓ is convex: a
    step in natural coordinates can leave the cone at any ρ, which those of `Hessian` and `BonnetPrice` never do on
    convex ℓ.  Use it to compare with these papers; `ClosedEntropyStein` averages both triangles, with less noise.

    Args:
        draws: the number S of antithetic draws, or draws such as `Independent`, `Antithetic`, `Quasi` and `Fixed`.

    Raises:
        InputError: as `Stein` does.

    >>> import torch
    >>> from torchngvi import CholeskyGaussian, LogJoint
    >>> q, target = CholeskyGaussian(2), LogJoint(lambda theta: -theta.sum(-1))
    >>> Reparametrized(4)(q, target).derivative.a.tolist()
    [1.0, 1.0]
    """

    _lands, _both = False, False


@final
class PathDerivative(_FromGradients):
    """a and W from one draw, as published; `Stein` averages both triangles and has less variance.

        r = Cᵀ∇ℓ(m + C z) - γz        a = E[r]        M = E[r zᵀ]        W = γI + tril½[M] + tril½[M]ᵀ

    It is the path derivative of Roeder, Wu and Duvenaud (2017) as in Tan (2025), section 3.2: the gradient of L in C is
    C⁻ᵀM, of which a triangular root has the lower part; where the frame is upper triangular it is Mᵀ that counts.  The
    value has the same control variate, ℓ - ½γ(|z|² - D), so that the loss of a step is -log joint + γ log q at the
    draw.  Where q is the exact Gaussian posterior, a, W and the loss have no variance.  With `Fixed` draws it is the
    same as `Stein`.

    Args:
        draws: one independent draw by default; else the number S of antithetic draws, or draws such as `Independent`,
            `Antithetic`, `Quasi` and `Fixed`.

    Raises:
        InputError: as `Stein` does.

    >>> import torch
    >>> from torchngvi import SRVN, CholeskyGaussian
    >>> q = CholeskyGaussian(2, dtype=torch.float64)
    >>> opt = SRVN(q, lr=0.1, estimator=PathDerivative())
    >>> round(opt.step(lambda theta: -0.5 * theta.square().sum(-1)).item(), 9)  # -log 2π, at any draw
    -1.837877066
    """

    _lands, _both = True, False

    def __init__(self, draws: Draws | int | None = None) -> None:
        super().__init__(Independent(1) if draws is None else draws)


@final
class ScoreFunction(Drawing):
    """a and W from values at S draws, for a log joint that has no gradient, such as that of a simulator.

        h = ℓ(m + C z) - ½γ|z|²        a = E[(h - b) z]        W = γI + E[(h - b) zzᵀ]

    It is the score function estimator (Williams 1992; Ranganath, Gerrish and Blei 2014) in the frame, where the scores
    are z and zzᵀ - I and the natural gradient needs no solve (from Tan 2025, section 3.1).  b is the mean of h over the
    other draws (leave-one-out baseline: Kool, van Hoof and Welling 2019), and h is constant where q is the exact
    Gaussian posterior: neither a nor W has any variance there.  The variance grows with D as that of gradients does
    not, so that it is of use in few dimensions or with many draws.

    Args:
        draws: the number S of antithetic draws, or draws, `Independent` or `Antithetic`; at least two draws or pairs.

    Raises:
        InputError: if draws is neither, or the number is not positive and even, or there are fewer than two draws or
            pairs.
        PairError: if the draws depend on one another.

    >>> from torchngvi import CholeskyGaussian, LogJoint
    >>> q, target = CholeskyGaussian(1), LogJoint(lambda theta: -theta.detach().square().sum(-1) / 2)
    >>> ScoreFunction(4)(q, target).derivative.W.item()
    1.0
    """

    def __init__(self, draws: Draws | int = 64) -> None:
        super().__init__(draws)
        if not self.draws.independent:
            raise PairError(
                "ScoreFunction subtracts from each value the mean of the others, which must not depend on its draw; "
                f"those of {type(self.draws).__name__} depend on one another. Use Independent or Antithetic."
            )
        self._block = 2 if self.draws.mirrored else 1
        if self.draws.num_samples < 2 * self._block:
            raise InputError(
                "ScoreFunction compares a draw with others, and needs at least 2 independent draws or 4 antithetic "
                f"ones; got {self.draws.num_samples}."
            )

    def __call__(self, q: Posterior, target: Target) -> Expectation:
        """Estimate E_q[ℓ], a and W at q, from the values at new draws."""
        frame, gamma, count = q.frame(), target.temperature, self.draws.num_samples
        z = self.draws(q.mean_probe.detach())
        with torch.no_grad():
            energy = -target.log_joint(frame.mean + frame.push(z))
        h = energy - 0.5 * gamma * q.structure.dot(z, z)
        blocks = h.unflatten(0, (self._block, -1))  # a draw beside its mirror image
        others = (h.sum(0) - blocks.sum(0)) / (count - self._block)
        weighted = (blocks - others).flatten(0, 1)[..., None] * z / count
        a = weighted.sum(0)
        W = q.sym_outer(weighted, z) + gamma * q.structure.eye(a)
        return Expectation(energy.mean(0), Framed(a, W), gamma, False, Cost(0, 0, count))


# ------------------------------------------------------------------------------------ averages over fixed draws
# Averages over fixed draws that tell their own error: what `torchngvi.fit` minimises where a log joint is a black box.
#
#     r = Cᵀ∇ℓ(m + C z) - γz        a = mean r        W = γI + mean (r zᵀ + z rᵀ)/2
#
# The symmetric part has about half the variance of the triangle that is the derivative of the mean of ℓ
# over the draws (which `Stein(Fixed(S))` takes), and so comes twice as near to the optimum of L.  It
# is a derivative of that mean up to noise, and steps are judged with that much slack:
#
#     noise² = |standard error of (a, W)|²_F⁻¹ = Σ_pairs |r̄|² + ¼(|r|²|z|² + (r·z)²) / (pairs (pairs - 1))
#
# with r̄ and r the even and the odd part of the residual of a pair z, -z, and of a mean field or blocks without what is
# linear in z, which whitened draws see without error.  At the optimum of the average
# L is about half of noise² above its minimum.
#
# Under a q over a forest the gradient in the coordinates of a node depends on the draws of its clique, and that in
# those of an ancestor on the draws of all its descendants, which are many.  With draws whitened in each clique
# (``Fixed(S, pattern=...)``) the border of a node therefore takes one triangle, mean r_c z_aᵀ with r_c that of the
# node and z_a the draws of its ancestors, and noise² leaves out of r_c what is quadratic in the draws of the clique.


@final
class SampleAverage(Drawing):
    """a, W and their squared standard error noise² from gradients at S fixed draws in antithetic pairs.

    `torchngvi.fit` uses it for a log joint that is only a function, and judges its steps with noise² as the slack.  It
    is `comparable` in the sense that noise² gives: two calls agree, and the derivative is that of the value up to this
    standard error.

    Args:
        draws: whitened draws, S ≥ 2D for a full covariance.
        watch: called with what is seen, while q is where it was seen.

    >>> from torchngvi import CholeskyGaussian, LogJoint
    >>> q, target = CholeskyGaussian(1), LogJoint(lambda theta: -0.5 * theta.square().sum(-1))
    >>> e = SampleAverage(Fixed(4))(q, target)  # q is the posterior
    >>> e.derivative.a.abs().item() < 1e-6, e.noise2.item() < 1e-12
    (True, True)
    """

    derives_value = True  # up to noise²

    draws: Fixed

    def __init__(self, draws: Fixed, watch: Callable[[Seen], None] | None = None) -> None:
        super().__init__(read_instance("draws", draws, Draws, "are fixed draws, such as Fixed(16)"))
        if watch is not None:
            read_callable("watch", watch)
        self.watch = watch

    def __call__(self, q: Posterior, target: Target) -> Expectation:
        """Estimate E_q[ℓ], a, W and noise² at q."""
        seen, gamma = self.see(q, target), target.temperature
        if self.watch is not None:
            self.watch(seen)
        residual = seen.pulled - gamma * seen.z
        share = residual / len(seen.z)
        a = share.sum(0)
        cost, pattern = Cost(self.draws.num_samples, 0), self.draws.pattern
        if pattern is not None:
            W = _by_nodes(pattern, share, seen.z) + gamma * pattern.eye(a)
            noise2 = _noise2_of_nodes(pattern, seen.pulled - pattern.smv(W, seen.z), seen.z)
            return Expectation(seen.energy.mean(0), Framed(a, W), gamma, target.comparable, cost, noise2)
        W = q.sym_outer(share, seen.z) + gamma * q.structure.eye(a)
        if self.draws.apart:  # terms of a sum, of which only that is near γI: whitened draws see W z without error
            residual = seen.pulled - q.structure.smv(W, seen.z)
        noise2 = _noise2(q, seen, residual, self.draws.apart)
        return Expectation(seen.energy.mean(0), Framed(a, W), gamma, target.comparable, cost, noise2)


def _by_nodes(pattern: Forest, share: Tensor, z: Tensor) -> Structured:
    """Π(Σ_s r zᵀ), with r of the node and z of its ancestors in each border, and squares made symmetric."""
    parts = pattern.parts(pattern.lower(z, share))
    return pattern.matrix([Part(0.5 * (square + square.mT), border) for square, border in parts])


def _noise2_of_nodes(pattern: Forest, residual: Tensor, z: Tensor) -> Tensor:
    """The same for `_by_nodes`, of a residual (S, D) without W z, 0-d."""
    (plus, minus), half = residual.chunk(2), z.chunk(2)[0]
    noise2 = residual.new_zeros(len(half))
    for kind, clique in zip(pattern.on(z), pattern.gather(half), strict=True):
        even, odd = (0.5 * (plus + sign * minus)[:, kind.place] for sign in (1, -1))  # (S / 2, n, r)
        own, above = clique.split([kind.size, kind.above], -1)
        even, product, squared = _without_quadratic(even, clique), odd * own, odd.square().sum(-1)
        square = 0.25 * (squared * own.square().sum(-1) + product.sum(-1).square())
        each = (even - even.mean(0)).square().sum(-1) + square + squared * above.square().sum(-1)
        noise2 = noise2 + each.sum(-1)
    return noise2.mean(0) / max(len(half) - 1, 1)


def _noise2(q: Posterior, seen: Seen, residual: Tensor, apart: bool) -> Tensor:
    """(*batch,)."""
    (plus, minus), z = residual.chunk(2), seen.z.chunk(2)[0]
    even, odd = 0.5 * (plus + minus), 0.5 * (plus - minus)
    if not apart and q.structure.widest < q.dim and is_whole(q.structure):
        odd = _without_linear(odd, z)
    if apart:  # in few coordinates
        even = _without_quadratic(even, z)
    near, product = q.structure.neighbours, odd * z
    # ½‖Π(½(r zᵀ + z rᵀ))‖²_F, entry by entry of the pattern
    spread = 0.25 * (odd.square() * near(z.square()) + product * near(product)).sum(-1)
    each = q.structure.total((even - even.mean(0)).square().sum(-1) + spread)
    return each.mean(0) / max(len(z) - 1, 1)


def _without_linear(odd: Tensor, z: Tensor) -> Tensor:
    """What a linear function of z leaves of the odd part, (S / 2, *batch, D); as large as its errors are."""
    pairs, dim = len(z), z.shape[-1]
    if pairs < 2 * dim:
        return odd
    columns, y = z.movedim(0, -2), odd.movedim(0, -2)  # (*batch, S / 2, D), of which zᵀz = S/2 I
    rest = y - columns @ (columns.mT @ y / pairs)
    return (rest * (pairs / (pairs - dim)) ** 0.5).movedim(-2, 0)


def _without_quadratic(even: Tensor, z: Tensor) -> Tensor:
    """Subtract from the even part, (S / 2, *batch, k), its least-squares quadratic in z."""
    row, column = torch.tril_indices(z.shape[-1], z.shape[-1], device=z.device)
    terms, pairs = 1 + len(row), len(z)
    if pairs < 2 * terms:
        return even
    basis = torch.cat([torch.ones_like(z[..., :1]), z[..., row] * z[..., column]], -1).movedim(0, -2)
    columns = torch.linalg.qr(basis)[0]
    y = even.movedim(0, -2)
    rest = y - columns @ (columns.mT @ y)
    return (rest * (pairs / (pairs - terms)) ** 0.5).movedim(-2, 0)
