"""Rows beside a q that was found: added to it, taken from it, or near to those that are predicted.

At fixed hyper-parameters and inducing points q = N(m, C Cᵀ) is the prior of further rows: with v = m + C w and w ~
N(0, I) their a_n become Cᵀa_n and their μ_n become e_n, and the sites of these rows alone are iterated, as in
`sparse_gp`.  To forget rows is to take away their sites at q.

To predict a row from those near it more than q is needed, for given v the rows are not independent: with rows a_n,
D = K - AᵀA and C = D_JJ + diag s_J² of k rows J near a test row, b = D_J*, the joint site N(y_J; μ_J + A_Jᵀv, C) in
the place of theirs moves q by E = C⁻¹ - diag s_J⁻², and

    f* | v, y_J  ~  N(μ* + a*ᵀv + bᵀC⁻¹(y_J - μ_J - A_Jᵀv),  d* - bᵀC⁻¹b)

(the partially independent conditional of Snelson and Ghahramani 2007, with a block of its own for each test row).  With
all rows it is the exact Gaussian process whatever the inducing points, and with none the prediction of q.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any, Self

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import RBFKernel
from gpytorch.likelihoods import GaussianLikelihood, Likelihood
from gpytorch.means import ZeroMean
from gpytorch.models import ApproximateGP
from gpytorch.variational import CholeskyVariationalDistribution, VariationalStrategy, _VariationalDistribution
from linear_operator.operators import DiagLinearOperator
from torch import Size, Tensor

from torchngvi.adapters.gpytorch.distribution import NaturalGradientVariationalDistribution
from torchngvi.adapters.gpytorch.energies import Latents, conjugate, latents_of
from torchngvi.adapters.gpytorch.model import (
    Projection,
    all_rows,
    as_in_predictions,
    evaluated,
    kept_modes,
    kernels,
    lent_posterior,
)
from torchngvi.adapters.gpytorch.sparse_gp import Point, ProfiledELBO, SparseGP
from torchngvi.adapters.gpytorch.training import forget_rows, remember_rows
from torchngvi.arguments import read_count, read_instance
from torchngvi.errors import InputError, PairError
from torchngvi.interfaces import Frame
from torchngvi.numerics.arrays import ENTRIES_AT_ONCE
from torchngvi.numerics.linalg import cholesky
from torchngvi.structures import Dense


@torch.no_grad()
def condition(model: ApproximateGP, likelihood: Likelihood, x: Tensor, y: Tensor) -> ApproximateGP:
    """Add rows to q, at fixed hyper-parameters and inducing points, without the rows that it was found for.

    For Gaussian noise q is afterwards that of all rows, in whatever order they come; for other likelihoods nearly so.

    Args:
        model: as `train_svgp` takes it, of one latent function.
        likelihood: see `SparseGP`; a `FixedNoiseGaussianLikelihood` of the noises of these rows.
        x: inputs (rows, features).
        y: targets (rows,).

    Returns:
        The model itself, with the new q.

    Raises:
        InputError: rows that fit neither the model nor one another, or at which the ELBO is not finite.
        PairError: a model or a likelihood that it cannot serve.

    >>> from torchngvi.adapters.gpytorch.conditioning import example
    >>> model, likelihood, x, y = example()
    >>> for rows, targets in zip(x.split(20), y.split(20)):  # a stream of rows
    ...     _ = condition(model, likelihood, rows, targets)
    >>> bool((model.eval()(x).mean - y).abs().max() < 0.1)
    True
    """
    with _given(model, likelihood, x, y) as given:
        given.assign(*given.added())
        remember_rows(model, [given.bound.x])
    return model


@torch.no_grad()
def forget(model: ApproximateGP, likelihood: Likelihood, x: Tensor, y: Tensor) -> ApproximateGP:
    """Take rows that q was found for away from it again, the opposite of `condition`.

    Args:
        model, likelihood, x, y: see `condition`.

    Returns:
        The model itself, with the new q.

    Raises:
        InputError: rows of which q knows less than they say, so that it was not found for them.
        PairError: see `condition`.

    >>> from torchngvi.adapters.gpytorch.conditioning import example
    >>> model, likelihood, x, y = example()
    >>> _ = condition(model, likelihood, x, y)
    >>> (forget(model, likelihood, x[:50], y[:50]).eval()(x[[0, -1]]).variance > 0.9).tolist()
    [True, False]
    """
    with _given(model, likelihood, x, y) as given:
        given.assign(*given.taken())
        forget_rows(model, given.bound.x)
    return model


def fantasize(model: ApproximateGP, likelihood: Likelihood, x: Tensor, y: Tensor) -> ApproximateGP:
    """Copy a model once for each of several sets of rows, as one batch, each conditioned on its own.

    For Gaussian noise the predictions of the copy are differentiable in x and y.

    Args:
        model, likelihood: see `condition`.
        x: inputs (rows, features), or (*batch, rows, features), whose batch broadcasts with that of y.
        y: targets (*batch, rows), as ``likelihood(model(x)).sample(torch.Size([64]))``.

    Returns:
        A copy of the model, whose predictions have the batch shape of y; its inducing points are not learned.

    Raises:
        InputError, PairError: see `condition`.

    >>> from torchngvi.adapters.gpytorch.conditioning import example
    >>> model, likelihood, x, y = example()
    >>> fantasy = fantasize(model, likelihood, x[:2], torch.tensor([[1.0, 1.0], [-1.0, -1.0]]).double())
    >>> fantasy.eval()(x[:1]).mean.sign().tolist()
    [[1.0], [-1.0]]
    """
    x, y = read_instance("x", x, Tensor, "has the inputs"), read_instance("y", y, Tensor, "has the targets")
    with kept_modes(model):  # without what predictions have left, which cannot be copied; nor can what has a graph
        fantasy = copy.deepcopy(model, {id(part): part for part in model.buffers() if not part.is_leaf})
    x = x[:, None] if x.ndim == 1 else x
    first = x.reshape(-1, *x.shape[-2:])[0], y.reshape(-1, y.shape[-1])[0]
    # without a graph that goes to the hyper-parameters alone
    learnt = x.requires_grad or y.requires_grad or any(not part.is_leaf for part in model.buffers())
    with _given(fantasy, likelihood, *first) as given, torch.set_grad_enabled(learnt and torch.is_grad_enabled()):
        strategy = given.strategy
        moments = given.added_to_each(x, y) if given.bound.conjugate else _one_by_one(fantasy, likelihood, x, y)
    shape, size = torch.broadcast_shapes(x.shape[:-2], y.shape[:-1]), strategy.inducing_points.shape[-2]
    q = NaturalGradientVariationalDistribution(size, shape, 0.0)
    q.to(dtype=strategy.inducing_points.dtype, device=y.device)
    mean, root = (part.to(q.dtype) for part in moments)
    q.posterior.register_buffer("mean", mean.expand(*shape, -1).clone())  # with its graph, unlike `initialize_`
    q.posterior.register_buffer("scale_tril", root.expand(*shape, -1, -1).clone())
    fantasy.variational_strategy = VariationalStrategy(
        fantasy, strategy.inducing_points.detach(), q, False, strategy.jitter_val
    )
    fantasy.variational_strategy.variational_params_initialized.fill_(1)
    return fantasy.train(model.training)


class FantasizingModel:
    """A mixin that gives a model of BoTorch fantasies: ``class Model(FantasizingModel, SingleTaskVariationalGP): ...``.

    Acquisition functions that look a step ahead, as ``qKnowledgeGradient``, ask for them; for Gaussian noise they are
    differentiable in the inputs.  Transforms of inputs and outcomes count.
    """

    model: ApproximateGP
    likelihood: Likelihood
    num_outputs: int
    _input_batch_shape: Size
    posterior: Callable[..., Any]
    transform_inputs: Callable[[Tensor], Tensor]

    def fantasize(self, X: Tensor, sampler: Callable[[Any], Tensor], **options: Any) -> Self:
        """Condition a copy on draws of noisy outcomes at X.

        Args:
            X: inputs (*batch, rows, features).
            sampler: makes draws (*draws, *batch, rows, 1) of a posterior of BoTorch.
            options: for `condition_on_observations`.

        Returns:
            The copy, of the batch shape (*draws, *batch).
        """
        return self.condition_on_observations(X, sampler(self.posterior(X, observation_noise=True)), **options)

    def condition_on_observations(self, X: Tensor, Y: Tensor, **options: Any) -> Self:
        """Condition a copy on outcomes Y (*batch, rows, 1) at X, at fixed hyper-parameters.

        Raises:
            PairError: several outcomes.
        """
        if self.num_outputs != 1:
            raise PairError(f"fantasies are of one outcome; the model has {self.num_outputs}.")
        fantasy = copy.deepcopy(self, {id(self.model): self.model})
        if hasattr(fantasy, "outcome_transform"):
            Y = fantasy.outcome_transform.eval()(Y)[0]
        fantasy.model = fantasize(self.model, self.likelihood, self.transform_inputs(X), Y[..., 0])
        fantasy._input_batch_shape = fantasy.model.variational_strategy._variational_distribution.batch_shape
        return fantasy


class _Given:
    """q as the prior of further rows."""

    def __init__(self, model: ApproximateGP, likelihood: Likelihood, x: Tensor, y: Tensor) -> None:
        begun = bool(getattr(getattr(model, "variational_strategy", None), "variational_params_initialized", True))
        latents = _alone(latents_of(model, likelihood), "rows are added to q and taken from it")
        self.strategy, self.bound = latents.strategy, ProfiledELBO(model, likelihood, all_rows((x, y), latents))
        as_in_predictions(model)
        q, given = self.bound.target.posterior, kernels(self.strategy, self.bound.x).projection(torch.float64)
        if not begun:  # the prior, without the noise that a training begins with
            q.initialize_(0.0, 1.0)
        with torch.enable_grad():  # q of a fantasy may have a graph
            self.given, self.mean, self.root = given, q.mean.double(), q.scale_tril.double()
        e = given.mean + given.rows @ self.mean
        self.projection = Projection(given.rows @ self.root, e, given.variance)

    def added(self) -> tuple[Tensor, Tensor]:
        """Mean and root of q with the rows."""
        nothing = torch.zeros_like(self.projection.mean)
        self.bound.sites = nothing, nothing
        return self._moments(self.bound._optimum(self.projection))

    def added_to_each(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The same for sets of rows with Gaussian noise, differentiable: an update of low rank."""
        prior = kernels(self.strategy, x)
        rows = torch.linalg.solve_triangular(prior.factor.mT, prior.cross.double().mT, upper=True, left=False)
        residual, r = y.double() - prior.mean.double() - (rows @ self.mean), rows @ self.root
        noise = self.bound.target.likelihood.noise.double().expand(r.shape[:-1])
        half = torch.linalg.solve_triangular(torch.linalg.cholesky(r @ r.mT + noise.diag_embed()), r, upper=False)
        within = torch.eye(len(self.root)).to(half) - half.mT @ half
        gain = self.root @ within @ r.mT / noise[..., None, :]
        mean = self.mean + (gain @ residual[..., None])[..., 0]
        return mean, torch.linalg.cholesky(self.root @ within @ self.root.mT)

    def taken(self) -> tuple[Tensor, Tensor]:
        """Mean and root of q without the rows."""
        e, v = self.projection.mean, self.projection.variance + self.projection.rows.square().sum(-1)
        _, alpha, beta = self.bound._moments(e, v)
        point = self.bound._at(self.projection, alpha - beta * e, -beta)
        if point is None:
            raise InputError(
                f"q knows less than these {len(e)} rows say: it was found for other rows, or for these with another "
                "noise. Forget rows that it was conditioned on, at the hyper-parameters of that time."
            )
        return self._moments(point)

    @torch.no_grad()
    def assign(self, mean: Tensor, root: Tensor) -> None:
        """Give the model the q of these moments."""
        q = self.bound.target.posterior
        q.initialize_(mean.to(q.dtype), q.kept_covariance(root.to(q.dtype)))

    def _moments(self, point: Point) -> tuple[Tensor, Tensor]:
        root, _ = cholesky(self.root @ point.inverse.mT @ point.inverse @ self.root.mT)
        return self.mean + self.root @ point.mean, root


@contextlib.contextmanager
def _given(model: ApproximateGP, likelihood: Likelihood, x: Tensor, y: Tensor) -> Iterator[_Given]:
    """A block in which the q of a model is the prior of further rows."""
    with lent_posterior(model), kept_modes(model, likelihood):
        with torch.no_grad():
            given = _Given(model, likelihood, x, y)
        yield given


@torch.no_grad()
def _one_by_one(model: ApproximateGP, likelihood: Likelihood, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """Means and roots of q with each of several sets of rows, for any likelihood."""
    shape = torch.broadcast_shapes(x.shape[:-2], y.shape[:-1])
    inputs = x.expand(*shape, *x.shape[-2:]).reshape(-1, *x.shape[-2:])
    targets = y.expand(*shape, -1).reshape(-1, y.shape[-1])
    found = [_Given(model, likelihood, *rows).added() for rows in zip(inputs, targets, strict=True)]
    return tuple(torch.stack(part).reshape(*shape, *part[0].shape) for part in zip(*found, strict=True))


def _alone(latents: Latents, what: str) -> Latents:
    """Check that there is one latent function."""
    if latents.coupled or latents.strategy._variational_distribution.batch_shape:
        raise PairError(f"{what} for one latent function; the model has several.")
    return latents


@torch.no_grad()
def predict_with_neighbours(
    model: ApproximateGP,
    likelihood: Likelihood,
    x: Tensor,
    train_x: Tensor,
    train_y: Tensor,
    neighbours: int = 8,
) -> MultivariateNormal:
    """Predict as ``model(x)`` in eval mode, corrected by the training rows that are nearest to each test row.

    Use it where inducing points are few: what they leave of a test row is predicted from the rows most correlated with
    it given them, by an exact Gaussian process.  Far from all rows it is ``model(x)``.

    Args:
        model: as `train_svgp` takes it, of one latent function, with the q that was found for the training rows.
        likelihood: of Gaussian noise, one or one for each training row.
        x: inputs (rows, features).
        train_x: the training inputs.
        train_y: their targets.
        neighbours: the number of training rows for each test row; 0 gives ``model(x)``.

    Returns:
        The latent function, each row for itself: means and variances; the likelihood of it predicts targets.

    Raises:
        PairError: a likelihood that is not Gaussian, several latent functions.
        InputError: rows that fit neither the model nor one another.

    >>> from torchngvi.adapters.gpytorch.conditioning import condition, example
    >>> model, likelihood, x, y = example()
    >>> _ = condition(model, likelihood, x, y)
    >>> near = predict_with_neighbours(model, likelihood, x, x, y)
    >>> bool((near.mean - y).abs().max() < 0.04)  # .09 without them
    True
    """
    neighbours = read_count("neighbours", neighbours, "counts training rows", at_least=0)
    if not conjugate(likelihood):
        raise PairError(
            f"predictions are corrected by rows near them for Gaussian noise; got {type(likelihood).__name__}. Use "
            "model(x), with more inducing points where it is too far off."
        )
    with lent_posterior(model), kept_modes(model, likelihood):
        as_in_predictions(model)
        target = SparseGP(model, likelihood, [(train_x, train_y)])
        _alone(target.latents, "predictions are corrected by rows near them")
        (train_x, train_y), (x, _) = all_rows(target.batches, target.latents), all_rows((x, x[..., 0]), target.latents)
        near = _Near(target, train_x, train_y, min(neighbours, len(train_y)))
        size = max(1, ENTRIES_AT_ONCE // (len(train_y) + (neighbours + 1) * (neighbours + target.posterior.dim)))
        parts = [near.predict(part) for part in x.split(size)]
    mean, variance = (torch.cat(part).to(train_x.dtype) for part in zip(*parts, strict=True))
    return MultivariateNormal(mean, DiagLinearOperator(variance))


class _Near:
    """The training rows, of which the nearest correct a prediction."""

    def __init__(self, target: SparseGP, x: Tensor, y: Tensor, number: int) -> None:
        self.target, self.x, self.number, q = target, x, number, target.posterior
        self.frame = Frame(q.mean.double(), q.scale_tril.double(), Dense(q.dim))
        self.given: Projection = kernels(target.strategy, x).projection(torch.float64)
        e, v, _ = self.given.moments(self.frame)
        self.residual, self.noise = y.double() - e, 1.0 / target._moments(y.double(), e, v, 1.0).curvature

    @evaluated()
    def predict(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Means and variances of the latent function at some rows."""
        strategy, root = self.target.strategy, self.frame.root
        here = kernels(strategy, x).projection(torch.float64)
        mean, variance, _ = here.moments(self.frame)
        if not self.number:
            return mean, variance
        both = strategy.model.forward(torch.cat([x, self.x])).lazy_covariance_matrix[: len(x), len(x) :]
        cross = both.to_dense().double() - here.rows @ self.given.rows.mT
        explained = cross.square() / (self.given.variance + self.noise)
        near = explained.topk(self.number).indices  # (rows, number)
        rows, b, noise = self.given.rows[near], cross.gather(-1, near), self.noise[near]
        D = strategy.model.forward(self.x[near]).covariance_matrix.double() - rows @ rows.mT
        D = D + strategy.jitter_val * torch.eye(self.number).to(D)
        L = torch.linalg.cholesky(D + noise.diag_embed())
        solved = torch.cholesky_solve(torch.cat([b[..., None], D / noise[..., None, :]], -1), L)
        weights, E = solved[..., 0], -solved[..., 1:]
        own = here.rows - (weights[..., None, :] @ rows)[..., 0, :]  # the row of f* given the targets near it
        scaled, own = rows @ root, own @ root
        g, residual = (scaled @ own[..., None])[..., 0], self.residual[near]
        inner = torch.eye(self.number).to(D) + scaled @ scaled.mT @ E
        of_residual, of_g = (E @ torch.linalg.solve(inner, torch.stack([residual, g], -1))).unbind(-1)
        mean = mean + (weights * residual + g * of_residual).sum(-1)
        return mean, here.variance - (b * weights + g * of_g).sum(-1) + own.square().sum(-1)


class _Example(ApproximateGP):
    def __init__(self, Z: Tensor, kind: type[_VariationalDistribution]) -> None:
        super().__init__(VariationalStrategy(self, Z, kind(len(Z))))
        self.mean_module, self.covar_module = ZeroMean(), RBFKernel()

    def forward(self, x: Tensor) -> MultivariateNormal:
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def example(
    kind: type[_VariationalDistribution] = CholeskyVariationalDistribution,
) -> tuple[ApproximateGP, Likelihood, Tensor, Tensor]:
    """Make a model of ten inducing points, a likelihood and 100 rows of a sine, for the examples of this library."""
    x = torch.linspace(-3, 3, 100).double()[:, None]
    likelihood = GaussianLikelihood().double()
    likelihood.noise = 0.01
    return _Example(x[5::10], kind).double(), likelihood, x, torch.sin(2 * x[:, 0])
