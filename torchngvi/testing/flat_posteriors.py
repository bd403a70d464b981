"""The checks of a posterior over a flat vector and of an exponential family."""

import copy
from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributions import Beta as BetaLaw
from torch.distributions import Distribution, Independent, MultivariateNormal, Normal, kl_divergence

from torchngvi.errors import PairError
from torchngvi.interfaces import Coordinates, Tangent
from torchngvi.posteriors.flat import (
    Beta,
    ExponentialFamily,
    FlatCholesky,
    FlatPosterior,
    MeanFieldGaussian,
    OrthogonalFlow,
    RankOneGaussian,
)
from torchngvi.testing.claims import BATCHES, DTYPE, EXACT, IDENTITY, SINGLE, Claim, batch_text, kind, normal

# The flat posteriors that metrics and estimators are tried on, with their laws as ``torch.distributions`` has them


def _numbers(*entries: object) -> Tensor:
    return torch.tensor(entries, dtype=DTYPE)


FLAT: dict[str, Callable[[], FlatPosterior]] = {
    "MeanFieldGaussian": lambda: MeanFieldGaussian(_numbers(0.3, -0.2, -1.5, 1.0)),
    "FlatCholesky": lambda: FlatCholesky(_numbers(0.4, -0.1), _numbers([2.0, 0.2], [0.2, 0.06])),
    "Beta": lambda: Beta(_numbers(2.5, 12.0)),
    "RankOneGaussian": lambda: RankOneGaussian(*_numbers([0.2, -0.4, 0.1], [0.6, -0.3, 0.8], [1.0, 0.2, 2.0])),
    "OrthogonalFlow": lambda: OrthogonalFlow(
        _numbers(0.3, -0.5), torch.linalg.qr(_numbers([1.0, 0.4], [-0.3, 1.0]))[0], _numbers(0.1, 0.2)
    ),
}


def _cholesky_law(lam: Tensor) -> Distribution:
    zero = torch.zeros_like(lam[..., 0])
    rows = [[lam[..., 2].exp(), zero], [lam[..., 3], lam[..., 4].exp()]]
    return MultivariateNormal(lam[..., :2], scale_tril=torch.stack([torch.stack(row, -1) for row in rows], -2))


def _rank_one_law(lam: Tensor) -> Distribution:
    mean, b, c = lam.chunk(3, -1)
    return MultivariateNormal(mean, b[..., :, None] * b[..., None, :] + c.square().diag_embed())


LAWS: dict[str, Callable[[Tensor], Distribution]] = {
    "MeanFieldGaussian": lambda lam: Independent(Normal(lam[..., :2], lam[..., 2:].exp()), 1),
    "FlatCholesky": _cholesky_law,
    "Beta": lambda lam: Independent(BetaLaw(lam[..., :1], lam[..., 1:]), 1),
    "RankOneGaussian": _rank_one_law,
}


def several(q: FlatPosterior, batch: tuple[int, ...], seed: int) -> FlatPosterior:
    """Make a batch of posteriors near one, on its manifold where there is one."""
    vector = q.vector.detach()
    if not batch:
        return q.at(vector)
    vector = vector.expand(*batch, q.size).contiguous()
    change = 0.05 * normal(*batch, q.size, seed=seed).to(vector.dtype)
    return q.at(q.retracted(vector, q.projected(vector, change)))


def fisher(
    law: Callable[[Tensor], Distribution],
    vector: Tensor,  # (D,)
) -> Tensor:  # (D, D)
    """Compute the Fisher matrix of a law by autograd, as the Hessian of KL(q_λ₀ ‖ q_λ) at λ = λ₀."""
    there = law(vector.detach())

    def divergence(lam: Tensor) -> Tensor:
        return kl_divergence(there, law(lam)).sum()

    return torch.autograd.functional.hessian(divergence, vector.detach())


# The check of a posterior over a flat vector: draws, density, scores, Fisher matrix, moves and state

DRAWS = 4000  # of a z-test


def check_flat_posterior(
    factory: Callable[[], FlatPosterior],
) -> None:
    """Check that a posterior over a flat vector keeps the contract of `FlatPosterior`.

    Its scores must be the gradients that autograd finds, along its manifold, and of draws they must have mean zero, by
    z-tests; so must I_F⁻¹ be the inverse of E[φφᵀ], and mean and variance those of the draws, where they are known.
    Draws are of any shape, and with ``rsample`` the same at the same noise.  Everything is asked of batches too, whose
    members must not depend on one another, at another λ, and in float32.  A step to NaN must be refused, and the state
    dict must restore the posterior.

    Args:
        factory: makes the posterior at a λ inside its domain, in float64 and without batch dimensions.

    Raises:
        AssertionError: an identity fails; the text says which, by how much, and for which input.

    >>> from torchngvi.posteriors.flat import Beta
    >>> check_flat_posterior(lambda: Beta(torch.tensor([2.0, 3.0], dtype=torch.float64)))
    """
    claim = Claim(kind(factory()))
    claim.holds(isinstance(factory(), FlatPosterior), "it must be a torchngvi.posteriors.flat.FlatPosterior")
    with torch.random.fork_rng(devices=[]):
        for batch in BATCHES:
            q, here = several(factory(), batch, 5), claim.at(batch_text(batch))
            with here.works("a method of the posterior"):
                _module(here, q)
                _samples(here, q)
                _densities(here, q)
                _moves(here, q)
                if batch:
                    _members(here, q)
                else:
                    with torch.no_grad():
                        _draws(here, q)


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def _module(claim: Claim, q: FlatPosterior) -> None:
    """What torch sees of it."""
    claim.holds(not list(q.parameters()), "it must have no parameters, which another optimizer would move")
    claim.holds(not q.vector.requires_grad, "its vector must not require grad")
    probe = q.mean_probe
    right = probe.is_leaf and probe.requires_grad and not bool(probe.any()) and probe.shape == q.vector.shape
    claim.holds(right, "mean_probe must be a leaf that requires grad, zero in the shape of λ")
    other = copy.deepcopy(q)
    theta = q.sample(2, _seeded())
    other.restore(Coordinates(q.retracted(q.vector, 0.1 * torch.ones_like(q.vector)), q.no_matrix))
    claim.holds(not torch.equal(other.log_prob(theta), q.log_prob(theta)), "the density must follow the vector")
    other.load_state_dict(q.state_dict())
    claim.same("load_state_dict must carry q", other.log_prob(theta), q.log_prob(theta))


def _samples(claim: Claim, q: FlatPosterior) -> None:
    """A number of draws, or their shape, as a list, a tuple or a torch.Size."""
    event = (*q.batch_shape, q.dim)
    draws = {"sample": q.sample, "rsample": q.rsample} if q.reparametrised else {"sample": q.sample}
    for name, draw in draws.items():
        for shape in (6, (6,), (2, 3), torch.Size((2, 3)), ()):
            size = (shape,) if isinstance(shape, int) else tuple(shape)
            got = tuple(draw(shape, _seeded()).shape)
            claim.holds(got == (*size, *event), f"{name}({shape}) must have the shape {(*size, *event)}; got {got}")
        flat, shaped = draw(6, _seeded()), draw((2, 3), _seeded())
        claim.same(f"{name} must give the same draws in any shape", shaped.reshape(flat.shape), flat)
    claim.holds(not q.sample(2).requires_grad, "sample must have no graph")
    if q.reparametrised:
        draws_of_both = q.rsample(4, _seeded()).detach(), q.sample(4, _seeded())
        claim.close("rsample must give the draws of sample, at the same noise", *draws_of_both)
        claim.holds(q.rsample(2).requires_grad, "rsample must be differentiable in λ")
        return
    try:
        q.rsample(2)
    except PairError:
        return
    claim.fail("rsample exists, so `reparametrised` must be True")


def _densities(claim: Claim, q: FlatPosterior) -> None:
    """Log density and score, at λ and elsewhere, for samples of several shapes."""
    theta, lam = q.sample((2, 3), _seeded()), q.vector.detach()
    weight = normal(2, 3, *q.batch_shape, seed=11)
    point = lam.clone().requires_grad_()
    (gradient,) = torch.autograd.grad((weight * q.log_prob(theta, point)).sum(), point)
    score = q.score(theta).detach()
    shape = (2, 3, *q.vector.shape)
    claim.holds(score.shape == shape, f"score must have the shape {tuple(shape)}; got {tuple(score.shape)}")
    total, expected = (weight[..., None] * score).sum((0, 1)), q.projected(lam, gradient)
    claim.close("score must be ∇_λ log q, along the manifold", total, expected, IDENTITY)
    value, size = q.log_prob(theta).detach(), tuple(shape[:-1])
    claim.holds(value.shape == size, f"log_prob must have the shape {size}; got {tuple(value.shape)}")
    claim.close("log_prob must be the same for one θ", q.log_prob(theta[0, 0]).detach(), value[0, 0], EXACT)
    q.log_prob(theta).sum().backward()
    claim.holds(q.mean_probe.grad is not None, "log_prob must be differentiable in the probe")
    q.drop_gradients()
    there = q.retracted(lam, q.projected(lam, 0.05 * torch.ones_like(lam)))
    other = q.at(there)
    claim.close("log_prob(θ, at) must be that of q at that λ", q.log_prob(theta, there), other.log_prob(theta).detach())
    claim.close("score(θ, at) must be that of q at that λ", q.score(theta, there), other.score(theta).detach())
    claim.close("sample(.., at) must be that of q at that λ", q.sample(2, _seeded(), there), other.sample(2, _seeded()))
    single = copy.deepcopy(q).float()
    claim.close("log_prob in float32 must be that of float64", single.log_prob(theta.float()), value.float(), SINGLE)
    claim.holds(single.sample(2).dtype == torch.float32, "draws must have the dtype of λ")


def _moves(claim: Claim, q: FlatPosterior) -> None:
    lam = q.vector.detach()
    still = torch.zeros_like(lam)
    new, ok = q.moved(Tangent(Coordinates(still, q.no_matrix)))
    claim.holds(ok.shape == q.batch_shape and bool(ok.all()), "moved() must take a step of length zero")
    claim.close("a step of length zero must lead to q itself", new.vector, lam, IDENTITY)
    spoiled = still.clone()
    spoiled.reshape(-1, q.size)[0, -1] = torch.nan
    told = q.moved(Tangent(Coordinates(spoiled, q.no_matrix)))[1].reshape(-1)
    claim.holds(not told[0] and bool(told[1:].all()), "moved() must refuse a step to NaN, member by member")
    direction = q.projected(lam, normal(*lam.shape, seed=12))
    claim.close("projected() must be a projection", q.projected(lam, direction), direction, IDENTITY)
    claim.holds(q.flat == torch.equal(q.projected(lam, lam), lam), "`flat` must say whether there is no manifold")
    claim.holds(q.in_domain(q.retracted(lam, 1e-3 * direction)).all(), "a small step must stay in the domain")


def _members(claim: Claim, q: FlatPosterior) -> None:
    theta = q.sample(4, _seeded())
    value, score = q.log_prob(theta).detach(), q.score(theta).detach()
    for index in ((0, 0), (1, 2)):
        alone = q.at(q.vector[index])
        of_all = (value[(slice(None), *index)], score[(slice(None), *index)])
        of_one = (alone.log_prob(theta[(slice(None), *index)]), alone.score(theta[(slice(None), *index)]))
        for one, whole in zip(of_one, of_all, strict=True):
            claim.close("batch members must not depend on one another", one.detach(), whole, IDENTITY)


def _draws(claim: Claim, q: FlatPosterior) -> None:
    """What holds of draws in the mean, by z-tests."""
    theta = q.sample(DRAWS, _seeded())
    score, x = q.score(theta).detach(), q.projected(q.vector, normal(q.size, seed=13))
    claim.unbiased("the scores of its draws must have mean zero", score, torch.zeros_like(x))
    try:
        y, z = q.exact_fisher_solve(x), q.exact_fisher_solve(2 * x + 1) - q.exact_fisher_solve(torch.ones_like(x))
    except PairError:
        pass
    else:
        claim.close("exact_fisher_solve must be linear", z, 2 * y, IDENTITY)
        claim.unbiased("exact_fisher_solve must invert E[φφᵀ] of its draws", score * (score @ y)[:, None], x)
    try:
        mean, variance = q.mean, q.variance
    except PairError:
        return
    claim.unbiased("mean must be that of its draws", theta, mean)
    claim.unbiased("variance must be that of its draws", (theta - mean).square(), variance)
    claim.close("stddev must be the root of variance", q.stddev, variance.sqrt())


# The check of an exponential family: its log-partition function, parameters, divergences and steps

_TRIGAMMA = 1e-7  # torch's, which autograd takes, is off by 5e-10


def check_exponential_family(
    factory: Callable[[], ExponentialFamily],
) -> None:
    """Check that a family keeps the contract of `ExponentialFamily`, and that of a flat posterior.

    The expectation parameters must be the gradient of the log-partition function and the mean of the statistics of
    draws; products with the Fisher matrix the derivative of the expectation parameters, and its solves the inverse of
    that; the natural parameters must come back from the expectation parameters.  Entropy and divergence must be those
    of draws.  Steps of any length must stay in the domain, and short ones follow a straight line.

    Args:
        factory: makes the family at an η inside its domain, in float64 and without batch dimensions.

    Raises:
        AssertionError: an identity fails; the text says which, by how much, and for which input.

    >>> from torchngvi.posteriors.flat import Gamma
    >>> check_exponential_family(lambda: Gamma(torch.tensor([2.0, 3.0], dtype=torch.float64)))
    """
    claim = Claim(kind(factory()))
    claim.holds(isinstance(factory(), ExponentialFamily), "it must be an ExponentialFamily")
    check_flat_posterior(factory)
    with torch.random.fork_rng(devices=[]):
        for batch in BATCHES:
            q, here = several(factory(), batch, 5), claim.at(batch_text(batch))
            assert isinstance(q, ExponentialFamily)
            with here.works("a method of the family"):
                _parameters(here, q)
                _steps(here, q)
                if not batch:
                    with torch.no_grad():
                        _draws_of_family(here, q)


def _parameters(claim: Claim, q: ExponentialFamily) -> None:
    """What autograd finds of A and ω, and the way back."""
    eta = q.vector.detach().clone().requires_grad_()
    (gradient,) = torch.autograd.grad(q.log_partition(eta).sum(), eta)
    omega = q.expectation().detach()
    claim.close("expectation must be the gradient of log_partition", omega, gradient, IDENTITY)
    change = q.vector * normal(*q.vector.shape, seed=21)
    _, derivative = torch.autograd.functional.jvp(lambda at: q.expectation(at), q.vector.detach(), change)
    product = q.fisher_product(change).detach()
    claim.close("fisher_product must be the derivative of expectation", product, derivative, _TRIGAMMA)
    back = q.exact_fisher_solve(product).detach()
    claim.close("exact_fisher_solve must undo fisher_product", back, change, _TRIGAMMA)
    claim.close("natural must undo expectation", q.natural(omega), q.vector, _TRIGAMMA)
    claim.close("with_expectation must make that member", q.with_expectation(omega).vector, q.vector, _TRIGAMMA)
    theta = q.sample(4, _seeded())
    size = (4, *q.vector.shape)
    got = tuple(q.statistics(theta).shape)
    claim.holds(got == size, f"statistics must have the shape {size}; got {got}")
    zero = q.kl(q.at(q.vector)).detach()
    claim.close("the divergence from itself must be 0", zero, torch.zeros_like(zero), IDENTITY)


def _steps(claim: Claim, q: ExponentialFamily) -> None:
    direction = q.vector * normal(*q.vector.shape, seed=22)
    short = q.retracted(q.vector, 1e-6 * direction) - q.vector
    claim.close("a short step must follow a straight line", 1e6 * short, direction, 1e-5)
    for seed in range(20):
        direction = q.vector.abs() * normal(*q.vector.shape, seed=seed)
        for length in (1.0, 30.0, 1000.0):
            inside = q.in_domain(q.retracted(q.vector, length * direction))
            claim.holds(bool(inside.all()), f"a step of {length:g} times η must stay in the domain")


def _draws_of_family(claim: Claim, q: ExponentialFamily) -> None:
    theta = q.sample(DRAWS, _seeded())
    other = q.at(q.retracted(q.vector, 0.1 * q.vector * normal(*q.vector.shape, seed=23)))
    claim.unbiased("expectation must be the mean of the statistics", q.statistics(theta), q.expectation())
    difference = q.log_prob(theta) - other.log_prob(theta)
    claim.unbiased("kl must be the mean of the log ratio", difference, q.kl(other))
    points, weights = q.points(DRAWS, torch.Generator().manual_seed(4))
    claim.close("the weights of points must sum to 1", weights.sum(0), torch.ones_like(weights[0]), IDENTITY)
    claim.holds(points.shape[1:] == theta.shape[1:], "points must have the shape of draws")
    try:
        entropy = q.entropy()
    except PairError:
        return
    claim.unbiased("entropy must be the mean of -log q", -q.log_prob(theta), entropy)
    b = q.base_coefficients()
    claim.close("log_base must be ⟨b, T⟩", q.log_base(theta), (q.statistics(theta) * b).sum(-1), IDENTITY)
