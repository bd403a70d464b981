"""What the ranks of `test_scale_ranks` do: each case is called with the number of the rank, or None in one process."""

import torch

import torchngvi as ngvi
from torchngvi.distributed import sum_gradients, synchronize
from torchngvi.expectations import SampleAverage
from torchngvi.models import PerDatum, ShardedDraws, SoftmaxRegression

ROWS, DIM = 2001, 6
POSTERIORS = {
    "cholesky": ngvi.CholeskyGaussian,
    "precision": ngvi.PrecisionCholeskyGaussian,
    "natural": ngvi.NaturalGaussian,
    "diagonal": ngvi.DiagonalGaussian,
}


def data(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(ROWS, DIM, generator=generator, dtype=torch.float64)
    y = (X.sum(-1) + torch.randn(ROWS, generator=generator, dtype=torch.float64) > 0).double()
    return X.to(dtype), y.to(dtype)


def rows_of(rank, cut=667):
    """Unequal parts."""
    return {None: slice(None), 0: slice(0, cut), 1: slice(cut, None)}[rank]


def glm(rank, cut=667):
    X, y = data()
    rows = rows_of(rank, cut)
    return ngvi.GeneralizedLinear(X[rows], y[rows], classes=(0, 1)) if len(X[rows]) else None


def streamed(rank, size=300):
    X, y = data()
    X, y = X[rows_of(rank)], y[rows_of(rank)]
    return ngvi.Streamed.linear(list(zip(X.split(size), y.split(size), strict=True)), len(X), classes=(0, 1))


def sharded(local, rank):
    return local if rank is None else ngvi.Sharded(local, ROWS)


def posterior(name="cholesky", batch=()):
    return POSTERIORS[name](DIM, batch, scale=0.5, dtype=torch.float64)


def state(q):
    return torch.cat([q.mean.flatten(), q.covariance.flatten()]).detach()


def outcome(q, result, target):
    processes = target.processes
    sums = 0 if processes is None else processes.sums
    return {
        "q": state(q),
        "loss": result.loss,
        "evaluations": result.evaluations,
        "reason": result.reason,
        "converged": result.converged,
        "sums": sums,
        "callbacks": None,
    }


def usual(q, rank):
    """From where q is: without it both begin at the mode, and go on by two methods."""
    return ngvi.VN(q)


def rows(rank, name, cut=667):
    target, q = sharded(glm(rank, cut), rank), posterior(name)
    before = 0 if rank is None else target.processes.sums
    found = outcome(q, ngvi.fit(q, target, usual(q, rank), progress=False), target)
    return found | {"sums": found["sums"] - before}


def from_the_mode(rank, family, cut=667):
    """Counts whose loss is e^20 where q begins, by the method of each."""
    X, y = data()
    y = {"bernoulli": y, "poisson": torch.poisson(X.sum(-1).exp(), generator=torch.Generator().manual_seed(1))}[family]
    X, y = X[rows_of(rank, cut)], y[rows_of(rank, cut)]
    local = ngvi.GeneralizedLinear(X, y, family, classes=(0, 1) if family == "bernoulli" else None) if len(X) else None
    target, q = sharded(local, rank), ngvi.CholeskyGaussian(DIM, dtype=torch.float64)
    return outcome(q, ngvi.fit(q, target, tolerance=1e-8, progress=False), target)


def second_order(rank, cut=667):
    """ℓ, ∇ℓ and ∇²ℓ of two members, and of a softmax regression."""
    X, y = data()
    theta = torch.linspace(-1, 1, 2 * DIM, dtype=torch.float64).reshape(2, DIM)
    value, derivative = sharded(glm(rank, cut), rank).second_order(theta)
    own = X[rows_of(rank, cut)]
    classes = (own[:, 0] > 0).long() + (own[:, 1] > 0).long()
    softmax = SoftmaxRegression(own, classes, classes=(0, 1, 2)) if len(own) else None
    other = torch.linspace(-1, 1, 2 * DIM, dtype=torch.float64)
    there, slope = sharded(softmax, rank).second_order(other)
    parts = [value, derivative.raw().g, derivative.raw().H, there, slope.raw().g, slope.raw().H]
    return torch.cat([part.flatten() for part in parts])


def rows_of_batches(rank, name):
    target, q = sharded(streamed(rank), rank), posterior(name)
    return outcome(q, ngvi.fit(q, target, ngvi.VN(q), progress=False), target)


def packet(rank, name, kind):
    q = posterior(name)
    target = sharded({"rows": glm, "streamed": streamed}[kind](rank), rank)
    value, derivative = target.expected_energy(q.frame())
    a, W = derivative.framed(q.frame())
    return torch.cat([value.flatten(), a.flatten(), W.flatten()])


def batch_of_posteriors(rank):
    q = posterior(batch=(3,))
    q.initialize_(torch.linspace(-1, 1, 3, dtype=torch.float64)[:, None].expand(3, DIM).clone(), 0.5)
    target = sharded(glm(rank), rank)
    opt = ngvi.VN(q)
    for _ in range(5):
        opt.step(target)
    return {"q": state(q)}


def log_likelihood(theta, batch):
    X, y = batch
    eta = theta @ X.mT
    return (y * eta - torch.nn.functional.softplus(eta)).sum(-1)


def data_log_joint(rank, halves=3):
    X, y = data()
    X, y = X[rows_of(rank)], y[rows_of(rank)]

    batches = list(zip(X.chunk(halves), y.chunk(halves), strict=True))
    target = ngvi.DataLogJoint(log_likelihood, lambda theta: -0.5 * theta.square().sum(-1), batches, len(X))
    target, q = sharded(target, rank), posterior()
    opt = ngvi.VN(q, estimator=SampleAverage(ngvi.Fixed(64, seed=1)))
    before = 0 if rank is None else target.processes.sums
    for _ in range(8):
        opt.step(target)
    sums = 0 if rank is None else target.processes.sums - before
    return {"q": state(q), "sums": sums, "evaluations": opt.evaluations}


def data_in_batches_by_draws(rank):
    """Every rank has all batches; the start of the first is that of all."""
    torch.manual_seed(0)
    X, y = data()

    batches = list(zip(X.chunk(3), y.chunk(3), strict=True))
    target = ngvi.DataLogJoint(log_likelihood, lambda theta: -0.5 * theta.square().sum(-1), batches, ROWS)
    target, q = target if rank is None else ShardedDraws(target), posterior()
    return outcome(q, ngvi.fit(q, target, progress=False), target)


def per_datum(rank):
    X, y = data()
    X, y = X[rows_of(rank)], y[rows_of(rank)]
    return PerDatum(
        lambda theta: y * (theta @ X.mT) - torch.nn.functional.softplus(theta @ X.mT),
        lambda theta: -0.5 * theta.square().sum(-1),
        1.0,
    )


def whole_log_joint(rank):
    torch.manual_seed(0 if rank is None else rank)  # fit takes the leader's draws
    target, q = sharded(per_datum(rank), rank), posterior()
    return outcome(q, ngvi.fit(q, target, progress=False), target)


def draws(rank):
    torch.manual_seed(0 if rank is None else rank)
    target, q = per_datum(None), posterior()
    target = target if rank is None else ShardedDraws(target)
    return outcome(q, ngvi.fit(q, target, progress=False), target)


def examined(rank):
    """The verdict on a log joint that no Gaussian fits."""
    torch.manual_seed(0 if rank is None else rank)
    target, q = ngvi.LogJoint(lambda theta: -1.5 * torch.log1p(theta.square()).sum(-1)), posterior()
    result = ngvi.fit(q, target if rank is None else ShardedDraws(target), progress=False)
    verdict = result.examination
    return {"q": state(q)} | ({} if verdict is None else {"word": verdict.word, "effort": verdict.effort})


def stein(rank):
    target, q = per_datum(None), posterior()
    target = target if rank is None else ShardedDraws(target)
    opt = ngvi.VN(q, lr=0.2, estimator=ngvi.Stein(ngvi.Fixed(32, seed=3)))
    before = 0 if rank is None else target.processes.sums
    for _ in range(10):
        opt.step(target)
    return {"q": state(q), "sums": 0 if rank is None else target.processes.sums - before, "evaluations": 10}


def closure(rank, kind="rows"):
    target, q = sharded({"rows": glm, "streamed": streamed}[kind](rank), rank), posterior()
    opt = ngvi.VN(q)
    for _ in range(6):
        opt.step(lambda: target.negative_elbo(q))
    return {"q": state(q)}


def hessian(rank):
    """Second derivatives of a sharded log joint, by double backward."""
    target = sharded(per_datum(rank), rank)
    theta = torch.full((1, DIM), 0.1, dtype=torch.float64, requires_grad=True)
    (g,) = torch.autograd.grad(target.log_joint(theta).sum(), theta, create_graph=True)
    rows_ = [torch.autograd.grad(g[0, k], theta, retain_graph=True)[0] for k in range(DIM)]
    return {"q": torch.cat([g.detach(), *rows_])}


def dropped_in(rank):
    """loss.backward(); opt.step() with the prior on the first rank, and sums by a hook."""
    X, y = data()
    X, y = X[rows_of(rank)], y[rows_of(rank)]
    q = posterior()
    opt = ngvi.VN(q, lr=0.3)
    if rank is not None:
        sum_gradients(opt)
    model = ngvi.GeneralizedLinear(X, y, classes=(0, 1))
    for _ in range(8):
        frame = q.probed()
        loss = model.data_energy(frame)[0]
        if not rank:
            loss = loss + model.prior.expected_energy(frame) - q.entropy()
        loss.backward()
        opt.step()
    return {"q": state(q)}


def sorted_rows(rank):
    """A shard of one class each, and one rank without rows."""
    X, y = data()
    X = X[y.argsort()]
    y = y.sort().values
    ones = int(y.sum())
    rows = {None: slice(None), 0: slice(0, ROWS - ones), 1: slice(ROWS - ones, None)}[rank]
    target = sharded(ngvi.GeneralizedLinear(X[rows], y[rows], classes=(0, 1)), rank)
    q = posterior()
    return outcome(q, ngvi.fit(q, target, usual(q, rank), progress=False), target)


def members(rank):
    """Each rank fits members of its own, and they are gathered once."""
    X, y = data()
    mine = slice(None) if rank is None else slice(2 * rank, 2 * rank + 2)
    targets = X[: 4 * 400].reshape(4, 400, DIM)[mine], y[: 4 * 400].reshape(4, 400)[mine]
    q = posterior(batch=targets[0].shape[:1])
    opt, target = ngvi.VN(q), ngvi.GeneralizedLinear(*targets)
    for _ in range(6):
        opt.step(target)
    processes = ngvi.Processes.alone() if rank is None else ngvi.Processes()
    return {"q": torch.cat(processes.gather(q.mean))}


def callback(rank, where):
    target, q = sharded(glm(rank), rank), posterior()
    seen = []
    callbacks = [lambda record: seen.append(record.evaluations) or (rank in (None, where) and record.evaluations == 3)]
    result = ngvi.fit(q, target, usual(q, rank), callbacks=callbacks, progress=False)
    return outcome(q, result, target) | {"callbacks": seen}


def failing_callback(rank, most):
    target, q = sharded(glm(rank), rank), posterior()

    def boom(record):
        if record.evaluations == 2:
            raise OSError("no space left")

    return ngvi.fit(q, target, callbacks=[boom], max_evaluations=most, progress=False)


def interrupted_in_a_callback(rank):
    """On the leader alone, by a callback."""
    target, q = sharded(glm(rank), rank), posterior()

    def leave(record):
        if record.evaluations == 3:
            raise KeyboardInterrupt

    return outcome(q, ngvi.fit(q, target, callbacks=[leave], progress=False), target)


def interrupted(rank):
    import os
    import signal

    target, q = sharded(glm(rank), rank), posterior()
    model, calls = target.local if rank is not None else target, []
    energy = type(model).data_energy

    def data_energy(frame):
        calls.append(None)
        if rank in (None, 1) and len(calls) == 4:
            os.kill(os.getpid(), signal.SIGINT)
        return energy(model, frame)

    model.data_energy = data_energy
    result = ngvi.fit(q, target, progress=False)
    return outcome(q, result, target)


def out_of_time(rank):
    target, q = sharded(glm(rank), rank), posterior()
    return outcome(q, ngvi.fit(q, target, max_seconds=1e-9, progress=False), target)


def with_checkpoint(rank, folder, most, cut=667):
    """The leader's file alone: that of the other rank does not exist."""
    path = f"{folder}/run.pt"
    target, q = sharded(glm(rank, cut), rank), posterior()
    result = ngvi.fit(q, target, checkpoint=path, checkpoint_every=1, max_evaluations=most, progress=False)
    return outcome(q, result, target) | {"trace": [tuple(record)[:-1] for record in result.trace]}


def bad_checkpoint(rank, path):
    target, q = sharded(glm(rank), rank), posterior()
    return ngvi.fit(q, target, checkpoint=path, progress=False)


def fault_prior(rank):
    X, y = data()
    rows = rows_of(rank)
    return ngvi.Sharded(ngvi.GeneralizedLinear(X[rows], y[rows], prior_precision=1.0 + rank, classes=(0, 1)), ROWS)


def fault_dtype(rank):
    X, y = data((torch.float64, torch.float32)[rank])
    rows = rows_of(rank)
    return ngvi.Sharded(ngvi.GeneralizedLinear(X[rows], y[rows], classes=(0, 1)), ROWS)


def fault_family(rank):
    X, y = data()
    rows = rows_of(rank)
    return ngvi.Sharded(ngvi.GeneralizedLinear(X[rows], y[rows], ("bernoulli_logit", "bernoulli_probit")[rank]), ROWS)


def fault_columns(rank):
    X, y = data()
    rows = rows_of(rank)
    return ngvi.Sharded(ngvi.GeneralizedLinear(X[rows][:, : DIM - rank], y[rows], classes=(0, 1)), ROWS)


def fault_classes(rank):
    X, y = data()
    rows = rows_of(rank)
    return ngvi.Sharded(ngvi.GeneralizedLinear(X[rows], y[rows] + rank), ROWS)


def fault_rows(rank):
    return ngvi.Sharded(glm(rank, 700), ROWS + 1)


def fault_no_rows(rank):
    return ngvi.Sharded(None, ROWS)


def fault_one_class(rank):
    X, y = data()
    order = y.argsort()
    X, y = X[order], y[order]
    with ngvi.Processes().together():
        model = ngvi.GeneralizedLinear(X[:600], y[:600]) if rank else ngvi.GeneralizedLinear(X, y)
    return ngvi.Sharded(model, 600)


def fault_threads(rank):
    torch.set_num_threads(1 + rank)
    try:
        return ngvi.Sharded(glm(rank), ROWS)
    finally:
        torch.set_num_threads(1)


def fault_q(rank):
    target, q = ngvi.Sharded(glm(rank), ROWS), posterior()
    if rank:
        q.initialize_(q.mean.clone() + 1e-15, 0.5)
    return ngvi.VN(q).step(target)


def fault_q_between(rank):
    target, q = ngvi.Sharded(glm(rank), ROWS), posterior()
    opt = ngvi.VN(q)
    opt.step(target)
    if rank:
        with torch.no_grad():
            q.initialize_(q.mean * (1 + 1e-15), q.scale_tril)
    return opt.step(target)


def fault_shape(rank):
    target = ngvi.Sharded(glm(rank), ROWS)
    q = ngvi.CholeskyGaussian(DIM + rank, scale=0.5, dtype=torch.float64)
    return ngvi.VN(q).step(target)


def fault_batch(rank):
    target, q = ngvi.Sharded(glm(rank), ROWS), posterior(batch=(3,) * rank)
    return ngvi.VN(q).step(target)


def fault_seeds(rank):
    target, q = ngvi.Sharded(per_datum(rank), ROWS), posterior()
    torch.manual_seed(rank)
    return ngvi.VN(q, lr=0.1).step(target)


def fault_draws(rank):
    target, q = ngvi.Sharded(per_datum(rank), ROWS), posterior()
    return ngvi.VN(q, lr=0.1, estimator=ngvi.Stein(ngvi.Fixed(32 * (1 + rank), seed=0))).step(target)


def fault_raises(rank):
    target, q = ngvi.Sharded(glm(rank), ROWS), posterior()
    if rank:

        def data_energy(frame):
            raise ZeroDivisionError("no such row")

        target.local.data_energy = data_energy
    return ngvi.VN(q).step(target)


def fault_settings(rank):
    target, q = ngvi.Sharded(glm(rank), ROWS), posterior()
    return ngvi.fit(q, target, tolerance=(1e-5, 1e-6)[rank], progress=False)


def fault_places(rank):
    target, q = ngvi.Sharded(glm(rank), ROWS), posterior()
    return target.processes.agree(a=1) if rank else ngvi.VN(q).step(target)


def fault_file(rank, path):
    """A file that is missing on one rank."""
    with ngvi.Processes().together():
        if rank:
            raise FileNotFoundError(f"there is no {path}")


def fault_sizes(rank):
    return ngvi.Processes().total([torch.ones(3 + rank)])


def fault_kind(rank):
    return ngvi.Sharded(ngvi.LogJoint(lambda theta: -theta.square().sum(-1)) if rank else glm(rank), ROWS)


def fault_twice(rank):
    return ngvi.Sharded(ngvi.Sharded(glm(rank), ROWS), ROWS)


def fault_alone(rank):
    batches = [torch.ones(ROWS)]
    local = ngvi.DataLogJoint(lambda theta, y: 0 * theta.sum(-1), lambda theta: 0 * theta.sum(-1), batches, ROWS)
    return ngvi.Sharded(None if rank else local, ROWS)


def nan_on_one_rank(rank):
    target, q = sharded(glm(rank), rank), posterior()
    if rank in (None, 1):
        target_ = target if rank is None else target.local
        target_.X[0, 0] = float("nan")
    result = ngvi.fit(q, target, progress=False)
    return outcome(q, result, target)


def raises_now_and_then(rank):
    """A log joint that fails on one rank from its fourth call on for a part of the draws: survived by all."""
    torch.manual_seed(0)
    local, calls = per_datum(rank), []
    terms = local.terms

    def failing(theta):
        calls.append(None)
        if rank == 1 and len(calls) > 3 and len(theta) > 1 and bool((theta[:, 0] > theta[:, 0].mean() + 3).any()):
            raise ValueError("too large")
        return terms(theta)

    local.terms = failing
    target, q = ngvi.Sharded(local, ROWS), posterior()
    result = ngvi.fit(q, target, progress=False)
    return outcome(q, result, target)


def synchronized(rank):
    q = posterior()
    opt = ngvi.VN(q)
    if rank:
        q.initialize_(torch.ones(DIM, dtype=torch.float64), 0.1)
    synchronize(q, opt)
    target = ngvi.Sharded(glm(rank), ROWS)
    result = ngvi.fit(q, target, opt, progress=False)
    return outcome(q, result, target)


def same_draws(rank):
    torch.manual_seed(rank)
    ngvi.Processes().same_draws()
    return torch.rand(2).tolist()
