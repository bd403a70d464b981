"""The sparse GP that several files of tests build their models from."""

import gpytorch as gp


class SparseModel(gp.models.ApproximateGP):
    """A constant mean, and a scaled RBF kernel unless another is given."""

    def __init__(self, q, Z, kernel=None, strategy=gp.variational.VariationalStrategy, **options):
        super().__init__(strategy(self, Z, q, **options))
        self.mean_module = gp.means.ConstantMean()
        self.covar_module = kernel or gp.kernels.ScaleKernel(gp.kernels.RBFKernel())

    def forward(self, x):
        return gp.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))
