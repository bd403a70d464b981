"""Rows beside a q that was found: added to it, taken from it, or near to those that are predicted.

At fixed hyper-parameters and inducing points q = N(m, C Cᵀ) is the prior of further rows: with v = m + C w and w ~
N(0, I) their a_n become Cᵀa_n and their μ_n become e_n, and the sites of these rows alone are iterated, as in
`profile`.  To forget rows is to take away their sites at q.

To predict a row from those near it more than q is needed, for given v the rows are not independent: with rows a_n,
D = K - AᵀA and C = D_JJ + diag s_J² of k rows J near a test row, b = D_J*, the joint site N(y_J; μ_J + A_Jᵀv, C) in
the place of theirs moves q by E = C⁻¹ - diag s_J⁻², and

    f* | v, y_J  ~  N(μ* + a*ᵀv + bᵀC⁻¹(y_J - μ_J - A_Jᵀv),  d* - bᵀC⁻¹b)

(the partially independent conditional of Snelson and Ghahramani 2007, with a block of its own for each test row).  With
all rows it is the exact Gaussian process whatever the inducing points, and with none the prediction of q.
"""

import copy
from collections.abc import Callable

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import Likelihood
from gpytorch.models import ApproximateGP
from gpytorch.variational import VariationalStrategy
from linear_operator.operators import DiagLinearOperator
from torch import Tensor

from torchngvi.adapters.gpytorch.batches import all_rows
from torchngvi.adapters.gpytorch.distribution import NaturalGradientVariationalDistribution
from torchngvi.adapters.gpytorch.energies import conjugate
from torchngvi.adapters.gpytorch.kernels import Projection, evaluated, kernels
from torchngvi.adapters.gpytorch.latents import Latents, latents_of
from torchngvi.adapters.gpytorch.lent import as_in_predictions, kept_modes, lent_posterior
from torchngvi.adapters.gpytorch.profile import Point, ProfiledELBO
from torchngvi.adapters.gpytorch.refinement import remember_rows
from torchngvi.adapters.gpytorch.sparse_gp import SparseGP
from torchngvi.arguments import read_count
from torchngvi.errors import InputError, PairError
from torchngvi.interfaces import Frame
from torchngvi.numerics.linalg import cholesky
from torchngvi.structures import Dense

_ENTRIES = 2**24  # of the matrices of a piece of the test rows


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

    >>> import gpytorch
    >>> class Model(gpytorch.models.ApproximateGP):
    ...     def __init__(self, Z):
    ...         q = gpytorch.variational.CholeskyVariationalDistribution(len(Z))
    ...         super().__init__(gpytorch.variational.VariationalStrategy(self, Z, q))
    ...         self.mean_module, self.covar_module = gpytorch.means.ZeroMean(), gpytorch.kernels.RBFKernel()
    ...     def forward(self, x):
    ...         return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))
    >>> x = torch.linspace(-2, 2, 50).double()[:, None]
    >>> model, likelihood = Model(x[::10]).double(), gpytorch.likelihoods.BernoulliLikelihood()
    >>> for part in x.split(10):  # a stream of rows
    ...     _ = condition(model, likelihood, part, (part[:, 0] > 0).double())
    >>> (likelihood(model.eval()(x)).mean[[0, -1]] > 0.5).tolist()
    [False, True]
    """
    return _moved(model, likelihood, x, y, _Given.added)


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
    """
    return _moved(model, likelihood, x, y, _Given.taken)


@torch.no_grad()
def fantasize(model: ApproximateGP, likelihood: Likelihood, x: Tensor, y: Tensor) -> ApproximateGP:
    """Copy a model once for each of several sets of targets, as one batch, each conditioned on its own.

    Args:
        model, likelihood, x: see `condition`.
        y: targets (*batch, rows), as ``likelihood(model(x)).sample(torch.Size([64]))``.

    Returns:
        A copy of the model, whose predictions have the batch shape of y; its inducing points are not learned.

    Raises:
        InputError, PairError: see `condition`.
    """
    fantasy = copy.deepcopy(model)
    with lent_posterior(fantasy), kept_modes(fantasy, likelihood):
        targets = y.reshape(-1, y.shape[-1])
        given = _Given(fantasy, likelihood, x, targets[0])
        strategy, moments = given.strategy, given.added_each(targets)
    q = NaturalGradientVariationalDistribution(strategy.inducing_points.shape[-2], y.shape[:-1], 0.0)
    fantasy.variational_strategy = VariationalStrategy(
        fantasy, strategy.inducing_points.detach(), q, False, strategy.jitter_val
    )
    q.to(dtype=strategy.inducing_points.dtype, device=y.device)
    found = (torch.stack(part).to(q.dtype) for part in zip(*moments, strict=True))
    mean, root = (part.reshape(*y.shape[:-1], *part.shape[1:]) for part in found)
    q.posterior.initialize_(mean, q.posterior.kept_covariance(root))
    fantasy.variational_strategy.variational_params_initialized.fill_(1)
    return fantasy.train(model.training)


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
        self.given, self.mean, self.root = given, q.mean.double(), q.scale_tril.double()
        e = given.mean + given.rows @ self.mean
        self.projection = Projection(given.rows @ self.root, e, given.variance)

    def added(self) -> tuple[Tensor, Tensor]:
        """Mean and root of q with the rows."""
        nothing = torch.zeros_like(self.projection.mean)
        self.bound.sites = nothing, nothing
        return self._moments(self.bound._optimum(self.projection))

    def added_each(self, targets: Tensor) -> list[tuple[Tensor, Tensor]]:
        """The same for each of several sets of targets, (sets, rows); for Gaussian noise they have one covariance."""
        found: list[tuple[Tensor, Tensor]] = []
        precision = self.bound._moments(self.projection.mean, self.projection.variance).curvature  # of the noise
        for y in targets:
            if found and self.bound.conjugate:
                (mean, root), shift = found[0], (precision * (y - targets[0])) @ self.given.rows
                found.append((mean + root @ (root.mT @ shift), root))
                continue
            self.bound.y = y
            found.append(self.added())
        return found

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

    def _moments(self, point: Point) -> tuple[Tensor, Tensor]:
        root, _ = cholesky(self.root @ point.inverse.mT @ point.inverse @ self.root.mT)
        return self.mean + self.root @ point.mean, root


def _moved(
    model: ApproximateGP,
    likelihood: Likelihood,
    x: Tensor,
    y: Tensor,
    move: Callable[[_Given], tuple[Tensor, Tensor]],
) -> ApproximateGP:
    with lent_posterior(model), kept_modes(model, likelihood):
        given = _Given(model, likelihood, x, y)
        q = given.bound.target.posterior
        mean, root = move(given)
        q.initialize_(mean.to(q.dtype), q.kept_covariance(root.to(q.dtype)))
        if move is _Given.added:
            remember_rows(given.strategy, [given.bound.x])
    return model


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

    >>> import gpytorch
    >>> from torchngvi.adapters.gpytorch import refine_svgp
    >>> class Model(gpytorch.models.ApproximateGP):
    ...     def __init__(self, Z):
    ...         q = gpytorch.variational.CholeskyVariationalDistribution(len(Z))
    ...         super().__init__(gpytorch.variational.VariationalStrategy(self, Z, q))
    ...         self.mean_module, self.covar_module = gpytorch.means.ZeroMean(), gpytorch.kernels.RBFKernel()
    ...     def forward(self, x):
    ...         return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))
    >>> x = torch.linspace(-9, 9, 200).double()[:, None]
    >>> y = torch.sin(x[:, 0])
    >>> model, likelihood = Model(x[::50]).double(), gpytorch.likelihoods.GaussianLikelihood().double()
    >>> _ = refine_svgp(model, likelihood, [(x, y)], progress=False)
    >>> near = predict_with_neighbours(model, likelihood, x, x, y)
    >>> bool((near.mean - y).square().mean() < 0.1 * (model.eval()(x).mean - y).square().mean())
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
        size = max(1, _ENTRIES // (len(train_y) + (neighbours + 1) * (neighbours + target.posterior.dim)))
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
