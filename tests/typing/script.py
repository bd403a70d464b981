"""A user's script, checked as it stands by ``mypy --strict``: what a call gives is known to the checker."""

import torch
from torch import Tensor

import torchngvi as ngvi
from torchngvi.errors import InputError
from torchngvi.fitting import Evaluations
from torchngvi.rules import NaturalGradient

X = torch.randn(200, 3, dtype=torch.float64)
y = (torch.rand(200) < torch.sigmoid(X[:, 0])).double()


def log_joint(theta: Tensor) -> Tensor:
    eta = theta @ X.T
    return (y * eta - torch.nn.functional.softplus(eta)).sum(-1) - 0.5 * theta.square().sum(-1)


def of_a_log_joint() -> tuple[bool, str]:
    q = ngvi.CholeskyGaussian(3, dtype=torch.float64)
    result: ngvi.FitResult = ngvi.fit(q, log_joint, stop=Evaluations(500), progress=False)
    mean: Tensor = q.mean
    draws: Tensor = q.sample((10,))
    print(mean.tolist(), draws.shape, q.covariance.diagonal(), q.state_dict())
    return result.converged, result.verdict.word


def of_a_regression() -> int:
    model = ngvi.GeneralizedLinear(X, y, family="bernoulli_logit", prior_precision=1.0)
    q = ngvi.CholeskyGaussian(3, dtype=torch.float64)
    evidence = ngvi.prior_by_evidence(q, model)
    precision: tuple[float, ...] = evidence.precision
    print(precision)
    return evidence.result.evaluations


def of_a_solved_regression() -> tuple[float, list[float]]:
    model = ngvi.GeneralizedLinear(X, y, prior_precision=1.0)
    result = ngvi.fit(ngvi.CholeskyGaussian(3, dtype=torch.float64), model, progress=False)
    q = ngvi.CholeskyGaussian(2, dtype=torch.float64)
    other = ngvi.GeneralizedLinear(X[:, :2], y, prior_precision=1.0)
    solution = ngvi.solved.solve(q, other)
    mean: Tensor = solution.mean
    found = ngvi.compare_models({"three": result, "two": (q, other)})
    less: ngvi.FitResult = ngvi.forget(result, [0, 1])
    bound: float = ngvi.certificate(q, other).bound
    density: Tensor = ngvi.leave_one_out(q, other).density
    print(mean, less.posterior, density, found, ngvi.solved.sensitivity(result))
    return bound, found.weight.tolist()


def of_a_refinement() -> str:
    result = ngvi.fit(ngvi.CholeskyGaussian(3, dtype=torch.float64), log_joint, progress=False)
    refined = ngvi.refine(result, log_joint)
    return refined.kind


def of_an_optimizer() -> float:
    model = ngvi.GeneralizedLinear(X, y, family="bernoulli_logit", prior_precision=1.0)
    q = ngvi.DiagonalGaussian(3, dtype=torch.float64)
    opt = ngvi.SRVN(q, lr=0.5, estimator=ngvi.Quadrature(), step_size=ngvi.KLRadius(0.1))
    plain = ngvi.NaturalGradientVI(ngvi.CholeskyGaussian(3, dtype=torch.float64), NaturalGradient(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, 0.99)
    loss = torch.zeros(())
    for _ in range(10):
        loss = opt.step(model)
        plain.step(model)
        scheduler.step()
    return loss.item()


def of_a_network() -> Tensor:
    net = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1.0, weight_decay=0.0)
    q = ngvi.network(net, num_data=200)
    ngvi.attach(optimizer, q, steps=10)
    for _ in range(10):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(net(X.float()), y.long())
        torch.autograd.backward(loss)
        optimizer.step()
    mean, epistemic, aleatoric = q.predictive(X.float())
    print(mean, epistemic, aleatoric)
    return q.predict(X.float(), samples=8)


def refused() -> str:
    try:
        ngvi.KLRadius(-1.0)
    except InputError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    torch.manual_seed(0)
    print(of_a_log_joint(), of_a_regression(), of_a_solved_regression(), of_a_refinement())
    print(of_an_optimizer(), of_a_network().shape, refused())
