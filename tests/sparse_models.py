"""The sparse GP of several files of tests: a constant mean, and a scaled RBF kernel unless another is given."""

import gpytorch as gp
import torch


class SparseModel(gp.models.ApproximateGP):
    def __init__(self, q, Z, kernel=None, strategy=gp.variational.VariationalStrategy, wrap=None, batch=(), **options):
        base, shape = strategy(self, Z, q, **options), torch.Size(batch)
        super().__init__(base if wrap is None else wrap(base))
        self.mean_module = gp.means.ConstantMean(batch_shape=shape)
        self.covar_module = kernel or gp.kernels.ScaleKernel(gp.kernels.RBFKernel(batch_shape=shape), batch_shape=shape)

    def forward(self, x):
        return gp.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def several(q, Z, functions, tasks=None):
    """A SparseModel of several functions, one for each task or mixed to so many."""

    def wrap(base):
        if tasks is None:
            return gp.variational.IndependentMultitaskVariationalStrategy(base, num_tasks=functions)
        return gp.variational.LMCVariationalStrategy(base, num_tasks=tasks, num_latents=functions)

    return SparseModel(q, Z, wrap=wrap, batch=(functions,))


def tightening(model, likelihood, x):
    """½ Σ (δ - log(1 + δ)), δ = d/s², by which the bound for Gaussian noise is above the ELBO; else 0."""
    if not isinstance(likelihood, gp.likelihoods.GaussianLikelihood | gp.likelihoods.FixedNoiseGaussianLikelihood):
        return torch.zeros(())
    strategy = model.variational_strategy
    Z, jitter = strategy.inducing_points, strategy.jitter_val
    K, size = model.forward(torch.cat([Z, x])).lazy_covariance_matrix, len(Z)
    cross, within = K[:size, size:].to_dense(), K[:size, :size].add_jitter(jitter).to_dense()
    explained = (cross * torch.linalg.solve(within, cross)).sum(0)
    delta = (K[size:, size:].diagonal(dim1=-1, dim2=-2) + jitter - explained) / likelihood.noise
    return 0.5 * (delta - delta.log1p()).sum()


def check_gradient(bound, learnt, step):
    """The gradient of a bound in each parameter is its central difference along a random direction."""
    for parameter, gradient in zip(learnt, torch.autograd.grad(bound(), learnt), strict=True):
        direction, values = torch.randn_like(parameter), []
        for moved in (step, -2 * step):
            parameter.data += moved * direction
            values.append(float(bound().detach()))
        parameter.data += step * direction
        wanted = (values[0] - values[1]) / (2 * step)
        assert abs(float((gradient * direction).sum()) - wanted) < 1e-4 * max(1.0, abs(wanted))
