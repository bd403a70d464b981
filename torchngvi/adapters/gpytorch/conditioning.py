"""What rows say beside a q that was found: predictions corrected by the rows near them.

Given v the rows are not independent: with rows a_n, D = K - AᵀA and C = D_JJ + diag s_J² of k rows J near a test row,
b = D_J*, the joint site N(y_J; μ_J + A_Jᵀv, C) in the place of theirs moves q by E = C⁻¹ - diag s_J⁻², and

    f* | v, y_J  ~  N(μ* + a*ᵀv + bᵀC⁻¹(y_J - μ_J - A_Jᵀv),  d* - bᵀC⁻¹b)

(the partially independent conditional of Snelson and Ghahramani 2007, with a block of its own for each test row).  With
all rows it is the exact Gaussian process whatever the inducing points, and with none the prediction of q.
"""

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import Likelihood
from gpytorch.models import ApproximateGP
from linear_operator.operators import DiagLinearOperator
from torch import Tensor

from torchngvi.adapters.gpytorch.batches import all_rows
from torchngvi.adapters.gpytorch.energies import conjugate
from torchngvi.adapters.gpytorch.kernels import Projection, evaluated, kernels
from torchngvi.adapters.gpytorch.lent import as_in_predictions, kept_modes, lent_posterior
from torchngvi.adapters.gpytorch.sparse_gp import SparseGP
from torchngvi.arguments import read_count
from torchngvi.errors import PairError
from torchngvi.interfaces import Frame
from torchngvi.structures import Dense

_ENTRIES = 2**24  # of the matrices of a piece of the test rows


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
    >>> errors = [float((found.mean - y).abs().max()) for found in (model.eval()(x), predict_with_neighbours(
    ...     model, likelihood, x, x, y))]
    >>> errors[1] < 0.5 * errors[0]
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
        if target.coupled or target.posterior.batch_shape:
            raise PairError("predictions are corrected by rows near them for one latent function; the model has more.")
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
