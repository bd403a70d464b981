"""The ELBO as a function of the hyper-parameters with the sites of q held, not its moments (Adam et al. 2021, t-SVGP).

Where q is optimal it is the prior times a Gaussian site for each datum, in f_n = μ_n + a_nᵀv

    t_n f_n - ½ c_n f_n²        c_n = β_n        t_n = β_n e_n - α_n

At other hyper-parameters θ q is what these sites make of the new prior and the new rows,

    S = I + Σ c_n a_n(θ) a_n(θ)ᵀ        Sm = Σ (t_n - c_n μ_n(θ)) a_n(θ)

For a Gaussian likelihood of fixed noise the sites do not depend on the kernel, and the ELBO is the collapsed bound of
Titsias (2009) at every kernel, which the ELBO at held moments touches in one point.  In general it is the tighter of
the two around the optimum, so that an M-step goes further.  (Adam et al. keep Σ c_n k_n k_nᵀ at the old kernel in
the place of the sites, for data that come in batches; that bound is loose for any but short M-steps.)
"""

from collections.abc import Callable, Iterable
from typing import final

import torch
from gpytorch.likelihoods import Likelihood
from gpytorch.models import ApproximateGP
from torch import Tensor

from torchngvi.adapters.gpytorch.batches import Batch, count
from torchngvi.adapters.gpytorch.kernels import Kernels, kernels
from torchngvi.adapters.gpytorch.latents import energy
from torchngvi.adapters.gpytorch.memory import forget
from torchngvi.adapters.gpytorch.sparse_gp import SparseGP
from torchngvi.errors import InputError
from torchngvi.numerics.linalg import cholesky


@final
class DualELBO:
    """E-steps by `refine_svgp`, M-steps on this: for data whose rows a_n fit into memory.

    Args:
        model, likelihood: see `SparseGP`.
        batches: all of the data.

    Raises:
        InputError: no data, several latent functions, hyper-parameters at which the sites give no q.
        PairError: a model or a likelihood it cannot serve.

    >>> import gpytorch
    >>> from torchngvi.adapters.gpytorch import NaturalGradientVariationalDistribution, refine_svgp
    >>> class Model(gpytorch.models.ApproximateGP):
    ...     def __init__(self, Z):
    ...         q = NaturalGradientVariationalDistribution(len(Z))
    ...         super().__init__(gpytorch.variational.VariationalStrategy(self, Z, q))
    ...         self.mean_module, self.covar_module = gpytorch.means.ZeroMean(), gpytorch.kernels.RBFKernel()
    ...     def forward(self, x):
    ...         return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))
    >>> x = torch.linspace(-2, 2, 50).double()[:, None]
    >>> data = [(x, torch.sin(3 * x[:, 0]))]
    >>> model, likelihood = Model(x[::10]).double(), gpytorch.likelihoods.GaussianLikelihood().double()
    >>> parameters = [*model.parameters(), *likelihood.parameters()]
    >>> for _ in range(3):
    ...     _ = refine_svgp(model, likelihood, data, progress=False)  # E
    ...     dual = DualELBO(model, likelihood, data)
    ...     lbfgs = torch.optim.LBFGS(parameters, max_iter=10, line_search_fn="strong_wolfe")
    ...     _ = lbfgs.step(dual.closure(lbfgs))  # M
    ...     dual.assign()
    >>> 0.0 < likelihood.noise.item() < 0.1
    True
    """

    def __init__(self, model: ApproximateGP, likelihood: Likelihood, batches: Iterable[Batch]) -> None:
        model.train()
        likelihood.train()
        self.target = SparseGP(model, likelihood, list(batches))
        if not self.target.batches:
            raise InputError("DualELBO got no data: the batches are empty. Give a list of pairs (x, y).")
        if self.target.coupled:
            raise InputError("DualELBO is for one latent function a datum; got several. Use train_svgp.")
        with torch.no_grad():
            sites = [(t.double(), c.double()) for t, c in self.target.sites_of_values(self.target.posterior)]
        self.sites = sites  # t_n and c_n, (*batch, B) each

    def __call__(self) -> Tensor:
        """The ELBO per datum, 0-d, differentiable in every hyper-parameter."""
        target = self.target
        priors, a, m, T = self._followed()
        V = torch.cholesky_inverse(T)
        size = m.shape[-1]
        # KL(q ‖ N(0, I)), log|V| = -2 log|T|
        divergence = 0.5 * (V.diagonal(dim1=-2, dim2=-1).sum(-1) + m.square().sum(-1) - size)
        value = -(divergence + T.diagonal(dim1=-2, dim2=-1).log().sum(-1)).sum()
        for (_, y), prior, columns in zip(target.batches, priors, a, strict=True):
            e = prior.mean + (m[..., None, :] @ columns)[..., 0, :]
            v = prior.variance + (columns * (V @ columns - columns)).sum(-2)
            values = target.latents.values(e.to(prior.mean.dtype), v.to(prior.mean.dtype))
            value = value - energy(target.likelihood, y, values).sum()
        return value / sum(count(x) for x, _ in target.batches)

    def closure(self, optimizer: torch.optim.Optimizer) -> Callable[[], Tensor]:
        """For ``optimizer.step``: minus the ELBO per datum, after ``backward``."""

        def evaluate() -> Tensor:
            optimizer.zero_grad()
            loss = -self()
            loss.backward()
            return loss.detach()

        return evaluate

    @torch.no_grad()
    def assign(self) -> None:
        """Give the model the q that its sites make at the present hyper-parameters."""
        _, _, m, T = self._followed()
        q = self.target.posterior
        covariance = torch.cholesky_inverse(T)
        scale = q.kept_covariance(cholesky(covariance)[0])
        q.initialize_(m, scale)
        forget(self.target.model)

    def _followed(self) -> tuple[list[Kernels], list[Tensor], Tensor, Tensor]:
        """The prior at each batch, its columns a_n (*batch, M, B), m, and T with S = T Tᵀ."""
        priors = [kernels(self.target.strategy, x) for x, _ in self.target.batches]
        a = [torch.linalg.solve_triangular(p.factor, p.cross.to(p.factor.dtype), upper=False) for p in priors]
        eye = torch.eye(a[0].shape[-2]).to(a[0])
        S: Tensor = sum((x * c[..., None, :]) @ x.mT for x, (_, c) in zip(a, self.sites, strict=True)) + eye
        weights = [t - c * p.mean for p, (t, c) in zip(priors, self.sites, strict=True)]
        vector: Tensor = sum((x @ b[..., None] for x, b in zip(a, weights, strict=True)), torch.zeros(()).to(S))
        T, ok = cholesky(S)
        if not bool(ok.all()):
            raise InputError(
                "the sites of q and the prior at these hyper-parameters make no Gaussian: take a shorter M-step, or "
                "refine q first."
            )
        return priors, a, torch.cholesky_solve(vector, T)[..., 0], T
