"""Models of GPyTorch and Pyro, and networks, over two processes, and the same in one; rank None is the one."""

import contextlib

import torch

from torchngvi import Processes

with contextlib.suppress(ImportError):  # before a clock runs
    import torchngvi.adapters.gpytorch
    import torchngvi.adapters.pyro  # noqa: F401

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
    from torchngvi.adapters.gpytorch import train_svgp_in_batches

    torch.manual_seed(rank or 0)  # the start of q is drawn, as the leader draws it
    model, likelihood, x, y = gp(kind)
    adam = torch.optim.Adam([*model.parameters(), *likelihood.parameters()], lr=0.05)
    group = None if rank is None else Processes()
    before = 0 if group is None else group.sums
    path = None if folder is None else f"{folder}/run.pt"
    result = train_svgp_in_batches(
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


def pyro_model(X, y):
    import pyro
    import pyro.distributions as dist

    beta = pyro.sample("beta", dist.Normal(torch.zeros(3, dtype=torch.float64), 1.0).to_event(1))
    scale = pyro.sample("scale", dist.LogNormal(torch.zeros((), dtype=torch.float64), 1.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(X @ beta, scale), obs=y)


def pyro_data():
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(40, 3, generator=generator, dtype=torch.float64)
    return X, X.sum(-1) + 0.5 * torch.randn(40, generator=generator, dtype=torch.float64)


def pyro_guide(rank, steps=None):
    """The log joint of a model of Pyro: by `fit_guide`, or by a run of `NaturalSVI`."""
    import pyro

    from torchngvi.adapters.pyro import AutoGaussian, NaturalSVI, fit_guide

    pyro.clear_param_store()
    torch.manual_seed(rank or 0)
    group = None if rank is None else Processes()
    guide, data = AutoGaussian(pyro_model, init_loc_fn=pyro.infer.autoguide.init_to_median), pyro_data()
    if steps is None:
        result = fit_guide(pyro_model, guide, *data, options={"progress": False, "group": group})
        found = {"evaluations": result.evaluations, "reason": result.reason}
    else:
        svi = NaturalSVI(pyro_model, guide, group=group, num_particles=6)
        result = svi.run(steps, *data, progress=False)
        found = {"evaluations": steps, "reason": result.reason}
    q = guide.posterior
    sums = 0 if group is None else group.sums
    return {"q": torch.cat([q.mean, q.covariance.flatten()]).detach(), "sums": sums, **found}


def network(rank, batches=12):
    """A posterior over the weights of a network, by DistributedDataParallel."""
    import torch.nn.functional as F
    from torch import nn

    from torchngvi.networks import GradientNoise, attach
    from torchngvi.networks import network as posterior

    torch.manual_seed(rank or 0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    q = posterior(model, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    attach(optimizer, q, steps=batches, curvature=GradientNoise(8))
    outer = model if rank is None else nn.parallel.DistributedDataParallel(model)
    rows, g = slice(None) if rank is None else slice(4 * rank, 4 * rank + 4), torch.Generator().manual_seed(1)
    for _ in range(batches):
        x, y = torch.randn(8, 3, generator=g, dtype=torch.float64), torch.randint(2, (8,), generator=g)
        optimizer.zero_grad()
        F.cross_entropy(outer(x[rows]), y[rows]).backward()
        optimizer.step()
    return {"q": torch.cat([t.flatten() for t in [*q.mean.values(), *q.variance.values()]]), "evaluations": batches}


def fault_svgp_rows(rank):
    from torchngvi.adapters.gpytorch import train_svgp_in_batches

    model, likelihood, x, y = gp("gaussian")
    adam = torch.optim.Adam(model.parameters())
    return train_svgp_in_batches(
        model, likelihood, batches_of(rank, x, y), ROWS + 1, adam, progress=False, group=Processes()
    )


def fault_svgp_settings(rank):
    return svgp(rank, "gaussian", epochs=1 + rank)


def fault_svgp_kind(rank):
    return svgp(rank, ("gaussian", "bernoulli")[rank])


def fault_svgp_refine(rank):
    return svgp(rank, "gaussian", refine=True)


def fault_svgp_nan(rank):
    from torchngvi.adapters.gpytorch import train_svgp_in_batches

    model, likelihood, x, y = gp("gaussian")
    y[130:140] = float("nan")
    adam = torch.optim.Adam(model.parameters())
    return train_svgp_in_batches(
        model, likelihood, batches_of(rank, x, y), ROWS, adam, progress=False, group=Processes()
    )


def fault_svgp_batch(rank):
    """A batch of another number of features on one rank, in its second round."""
    from torchngvi.adapters.gpytorch import train_svgp_in_batches

    model, likelihood, x, y = gp("gaussian")
    batches = batches_of(rank, x, y)
    if rank:
        batches[1] = (batches[1][0].expand(-1, 2), batches[1][1])
    adam = torch.optim.Adam(model.parameters())
    return train_svgp_in_batches(model, likelihood, batches, ROWS, adam, progress=False, group=Processes())


def fault_svgp_moved(rank):
    """A hyper-parameter that is moved on one rank by a callback of the leader."""
    from torchngvi.adapters.gpytorch import train_svgp_in_batches

    model, likelihood, x, y = gp("gaussian")

    def move(epoch, loss):
        with torch.no_grad():
            model.mean_module.constant.add_(1e-12)

    adam = torch.optim.Adam(model.parameters())
    batches = batches_of(rank, x, y)
    return train_svgp_in_batches(
        model, likelihood, batches, ROWS, adam, progress=False, group=Processes(), callbacks=[move]
    )


def fault_pyro_data(rank):
    """A model that fails on one rank when it is set up."""
    from torchngvi.adapters.pyro import AutoGaussian, fit_guide

    def model(X, y):
        if rank:
            raise ValueError("no such day")
        pyro_model(X, y)

    return fit_guide(model, AutoGaussian(model), *pyro_data(), options={"group": Processes(), "progress": False})


def fault_pyro_moved(rank):
    """A guide that is moved on one rank between two steps."""
    from torchngvi.adapters.pyro import AutoGaussian, NaturalSVI

    guide, data = AutoGaussian(pyro_model), pyro_data()
    svi = NaturalSVI(pyro_model, guide, group=Processes())
    svi.step(*data)
    if rank:
        q = guide.posterior
        q.initialize_(q.mean + 1e-12, q.scale_tril)
    return svi.step(*data)
