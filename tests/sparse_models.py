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
