"""Models of GPyTorch and Pyro, and networks, over two processes, and the same in one; rank None is the one."""

import torch

from torchngvi import Processes

ROWS, HALF = 400, 60  # rows of a batch of the second rank; those of the first are shorter


def rounds():
    """For each round the rows of the two ranks; in the last one the first has none left."""
    cuts, start = [], 0
    for _ in range(5):
        cuts.append((slice(start, start + 20), slice(start + 20, start + 80)))
        start += 80
    (left, right) = cuts[-1]
    cuts[-1] = (None, slice(left.start, right.stop))
    return cuts


def batches_of(rank, x, y):
    if rank is None:
        both = [[part for part in pair if part is not None] for pair in rounds()]
        return [tuple(torch.cat([t[part] for part in pair]) for t in (x, y)) for pair in both]
    return [(x[pair[rank]], y[pair[rank]]) for pair in rounds() if pair[rank] is not None]


def gp(kind):
    import gpytorch

    from torchngvi.adapters.gpytorch import NaturalGradientVariationalDistribution

    class Model(gpytorch.models.ApproximateGP):
        def __init__(self, Z):
            q = NaturalGradientVariationalDistribution(len(Z))
            super().__init__(gpytorch.variational.VariationalStrategy(self, Z, q))
            self.mean_module = gpytorch.means.ConstantMean()
            self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

        def forward(self, x):
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    generator = torch.Generator().manual_seed(0)
    x = 6 * torch.rand(ROWS, 1, generator=generator, dtype=torch.float64)
    f = torch.sin(2 * x[:, 0])
    noise = torch.randn(ROWS, generator=generator, dtype=torch.float64)
    y = f + 0.3 * noise if kind == "gaussian" else (f + noise > 0).double()
    Z = torch.linspace(0, 6, 12, dtype=torch.float64)[:, None]
    likelihoods = gpytorch.likelihoods
    likelihood = likelihoods.GaussianLikelihood() if kind == "gaussian" else likelihoods.BernoulliLikelihood()
    return Model(Z).double(), likelihood.double(), x, y


def svgp(rank, kind, epochs=3, folder=None, **settings):
    from torchngvi.adapters.gpytorch import train_svgp

    torch.manual_seed(rank or 0)  # the start of q is drawn, as the leader draws it
    model, likelihood, x, y = gp(kind)
    adam = torch.optim.Adam([*model.parameters(), *likelihood.parameters()], lr=0.05)
    group = None if rank is None else Processes()
    before = 0 if group is None else group.sums
    path = None if folder is None else f"{folder}/run.pt"
    result = train_svgp(
        *(model, likelihood, batches_of(rank, x, y), ROWS, adam),
        **{"epochs": epochs, "progress": False, "checkpoint": path, "group": group, **settings},
    )
    q = model.variational_strategy._variational_distribution.posterior
    hypers = torch.cat([p.detach().flatten() for p in [*model.parameters(), *likelihood.parameters()]])
    return {
        "q": torch.cat([q.mean.flatten(), q.covariance.flatten(), hypers]).detach(),
        "losses": torch.tensor(result.losses, dtype=torch.float64),
        "evaluations": result.evaluations,
        "sums": 0 if group is None else group.sums - before,
    }


def fault_svgp_rows(rank):
    from torchngvi.adapters.gpytorch import train_svgp

    model, likelihood, x, y = gp("gaussian")
    adam = torch.optim.Adam(model.parameters())
    return train_svgp(model, likelihood, batches_of(rank, x, y), ROWS + 1, adam, progress=False, group=Processes())


def fault_svgp_settings(rank):
    return svgp(rank, "gaussian", epochs=1 + rank)


def fault_svgp_kind(rank):
    return svgp(rank, ("gaussian", "bernoulli")[rank])


def fault_svgp_refine(rank):
    return svgp(rank, "gaussian", refine=True)


def fault_svgp_nan(rank):
    from torchngvi.adapters.gpytorch import train_svgp

    model, likelihood, x, y = gp("gaussian")
    y[130:140] = float("nan")
    adam = torch.optim.Adam(model.parameters())
    return train_svgp(model, likelihood, batches_of(rank, x, y), ROWS, adam, progress=False, group=Processes())


def fault_svgp_batch(rank):
    """A batch of another number of features on one rank, in its second round."""
    from torchngvi.adapters.gpytorch import train_svgp

    model, likelihood, x, y = gp("gaussian")
    batches = batches_of(rank, x, y)
    if rank:
        batches[1] = (batches[1][0].expand(-1, 2), batches[1][1])
    adam = torch.optim.Adam(model.parameters())
    return train_svgp(model, likelihood, batches, ROWS, adam, progress=False, group=Processes())


def fault_svgp_moved(rank):
    """A hyper-parameter that is moved on one rank by a callback of the leader."""
    from torchngvi.adapters.gpytorch import train_svgp

    model, likelihood, x, y = gp("gaussian")

    def move(epoch, loss):
        with torch.no_grad():
            model.mean_module.constant.add_(1e-12)

    adam = torch.optim.Adam(model.parameters())
    batches = batches_of(rank, x, y)
    return train_svgp(model, likelihood, batches, ROWS, adam, progress=False, group=Processes(), callbacks=[move])
