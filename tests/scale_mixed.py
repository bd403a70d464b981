"""Mixed models whose groups are spread over two processes, and the same in one; rank None is the one."""

import functools

import torch

from torchngvi import VN, PrecisionCholeskyGaussian, Processes, Sharded, fit
from torchngvi.models import GaussianNoise, GeneralizedLinear, MixedLogJoint, MixedPrior, Wishart

GROUPS, FIRST = 30, 11  # of which the first rank has so many
CASES = [("poisson_log", 1), ("poisson_log", 2), ("bernoulli_logit", 1), ("bernoulli_logit", 2)]


@functools.cache
def data(family, local):
    """Groups of three to six rows, in a random order: X, y, the groups, weights and offset."""
    generator = torch.Generator().manual_seed(5)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    number = torch.cat([torch.full((3 + k % 4,), k) for k in range(GROUPS)])
    number = number[torch.randperm(len(number), generator=generator)]
    X = torch.stack([torch.ones(len(number), dtype=torch.float64), normal(len(number))], -1)
    eta = 0.4 * X.sum(-1) + (0.7 * normal(GROUPS, local)[number] * X[:, :local]).sum(-1)
    if family == "poisson_log":
        y = torch.poisson(eta.exp(), generator)
    elif family == "bernoulli_logit":
        y = (torch.rand(len(number), dtype=torch.float64, generator=generator) < eta.sigmoid()).double()
    else:
        y = eta + 0.5 * normal(len(number))
    weights = 0.5 + torch.rand(len(number), dtype=torch.float64, generator=generator)
    return X, y, number, weights, 0.1 * normal(len(number))


def groups_of(rank, cut=FIRST):
    return {None: (0, GROUPS), 0: (0, cut), 1: (cut, GROUPS)}[rank]


def part(rank, family, local, cut=FIRST, **settings):
    """The rows of the groups of a rank, which are numbered from 0."""
    X, y, groups, weights, offset = data(family, local)
    first, end = groups_of(rank, cut)
    mine = (groups >= first) & (groups < end)
    X, y, number = X[mine], y[mine], groups[mine] - first
    settings = {"weights": weights[mine], "offset": offset[mine], **settings}
    return MixedLogJoint(X, y, (X[:, :local], number), family, **settings)


def rows():
    return len(data("poisson_log", 1)[1])


def spread(rank, family, local, cut=FIRST, **settings):
    return Sharded(part(rank, family, local, cut, **settings), rows())


def shared(model, q):
    """Means and covariance of the globals."""
    size = q.dim - model.rows.n * model.rows.r
    V = model.structure.parts(q.frame().marginals())[-1].square
    return torch.cat([q.mean[-size:], V.flatten()]).detach()


def own(model, q):
    """Means and standard deviations of the effects of the groups of a rank."""
    size = model.rows.n * model.rows.r
    return torch.stack([q.mean[:size], q.stddev[:size]], -1).detach()


def outcome(model, q, result, before):
    return {
        "q": shared(model, q),
        "groups": own(model, q),
        "loss": result.loss,
        "evaluations": result.evaluations,
        "reason": result.reason,
        "sums": model.processes.sums - before,
        "numbers": model.processes.numbers,
        "prior": torch.cat([*(x.flatten() for x in model.fixed.prior), model.covariance_prior.unit.reshape(1)]),
    }


def over_all(rank, family, local, cut=FIRST):
    """The Gaussian over all coordinates."""
    model = spread(rank, family, local, cut)
    q = model.posterior()
    before = model.processes.sums
    result = fit(q, model, progress=False)
    return outcome(model, q, result, before) | {"converged": result.converged}


def begun(rank, family, local):
    """Where the fit begins."""
    model = spread(rank, family, local)
    q = model.posterior()
    return {
        "q": shared(model, q),
        "groups": own(model, q),
        "prior": torch.cat([*(x.flatten() for x in model.fixed.prior), model.covariance_prior.unit.reshape(1)]),
    }


def with_checkpoint(rank, folder, most, cut=FIRST):
    model = spread(rank, "bernoulli_logit", 1, cut)
    q = model.posterior()
    before = model.processes.sums
    path = f"{folder}/run.pt"
    result = fit(q, model, checkpoint=path, checkpoint_every=1, max_evaluations=most, progress=False)
    trace = [tuple(record)[:-1] for record in result.trace]
    return outcome(model, q, result, before) | {"converged": result.converged, "trace": trace}


def fault_mixed_prior(rank):
    return spread(rank, "poisson_log", 1, prior=MixedPrior(precision=Wishart(3.0 + rank, [[1.0 + rank]])))


def fault_mixed_scale(rank):
    return spread(rank, "poisson_log", 1, prior=MixedPrior(fixed_scale=5.0 + rank))


def fault_mixed_noise(rank):
    return spread(rank, GaussianNoise(1.0 + rank), 1)


def fault_mixed_effects(rank):
    return spread(rank, "poisson_log", 1 + rank)


def fault_mixed_family(rank):
    return spread(rank, ("poisson_log", "bernoulli_logit")[rank], 1)


def fault_mixed_rows(rank):
    return Sharded(part(rank, "poisson_log", 1, FIRST), rows() + 3)


def fault_mixed_none(rank):
    return Sharded(None if rank else part(rank, "poisson_log", 1, GROUPS), rows())


def fault_mixed_and_not(rank):
    X, y, *_ = data("poisson_log", 1)
    return Sharded(GeneralizedLinear(X, y, "poisson_log") if rank else part(rank, "poisson_log", 1), rows())


def fault_mixed_groups(rank):
    """A group without rows, in the construction of a part."""
    X, y, groups, *_ = data("poisson_log", 1)
    with Processes().together():
        model = MixedLogJoint(X, y, (X[:, :1], groups + rank), "poisson_log")
    return Sharded(model, 2 * rows())


def fault_mixed_twice(rank):
    return Sharded(spread(rank, "poisson_log", 1), rows())


def fault_mixed_q(rank):
    model = spread(rank, "poisson_log", 1)
    q = model.posterior()
    if rank:
        q.initialize_(q.mean + 1e-12, q.stddev)
    return fit(q, model, progress=False)


def fault_mixed_raises(rank):
    model = spread(rank, "poisson_log", 1)
    q = model.posterior()
    if rank:
        model.rows.likelihood.expected = None
    return fit(q, model, progress=False)


def fault_mixed_dim(rank):
    """A q over fewer groups than the rank has."""
    model = spread(rank, "poisson_log", 1)
    q = model.posterior()
    return fit(PrecisionCholeskyGaussian(q.dim - 1, dtype=torch.float64) if rank else q, model, progress=False)


def fault_mixed_step(rank):
    """A step over all coordinates, in a block at whose end the ranks meet."""
    model = spread(rank, "poisson_log", 1)
    q = model.posterior()
    with Processes().together():
        VN(q).step(model)


def fault_mixed_places(rank):
    """Sums of other lengths at other places, of two objects of the same group."""
    model = spread(rank, "poisson_log", 1)
    return Processes().agree(a=1) if rank else fit(model.posterior(), model, progress=False)
