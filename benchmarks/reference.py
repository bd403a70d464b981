"""Another way to the best Gaussian, long and plain: Adam on the reparametrised ELBO, by draws that are new each time.

    best, elbo, error = long_run(q, log_joint)

θ = m + C(u + L z) with z ~ N(0, I): u and the triangular L, its diagonal in logarithms, are what Adam moves (Kingma
and Ba 2015), along the path derivative, whose variance vanishes where q is the posterior (Roeder, Wu and Duvenaud
2017); the step falls along half a cosine, and the average of the iterates over the last half is looked at beside the
last one.

    frame     m and C of the fit: from its end, and from there moved by two standard deviations and twice as wide
    no frame  m = 0, C = I: from N(0, I), as one would without a fit
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from torchngvi import CholeskyGaussian


def adam(
    log_joint: Callable[[Tensor], Tensor],
    mean: Tensor,  # m, (D,)
    root: Tensor,  # C, (D, D)
    shift: Tensor,  # u at the start, (D,)
    scale: float,  # L = scale · I at the start
    *,
    steps: int,
    draws: int = 64,
    lr: float = 0.02,
    seed: int = 0,
) -> list[tuple[Tensor, Tensor]]:
    """The mean and root of the last iterate and of the average over the last half."""
    dim, random = len(mean), torch.Generator().manual_seed(seed)
    u, free = shift.clone().requires_grad_(), torch.zeros_like(root)
    free.diagonal().fill_(math.log(scale))
    free.requires_grad_()
    optimizer = torch.optim.Adam([u, free], lr=lr)
    average = [torch.zeros_like(u), torch.zeros_like(free)]

    def factor(values: Tensor) -> Tensor:
        return values.tril(-1) + torch.diag(values.diagonal().exp())

    for step in range(steps):
        z = torch.randn(draws // 2, dim, generator=random, dtype=torch.float64)
        z, L = torch.cat([z, -z]), factor(free)
        x = u + z @ L.mT
        back = torch.linalg.solve_triangular(L.detach(), (x - u.detach()).mT, upper=False)
        log_q = -0.5 * back.square().sum(0)  # its own parameters held fixed: their score has mean 0
        loss = (log_q - log_joint(mean + x @ root.mT)).mean()
        optimizer.zero_grad()
        loss.backward()
        for parameter in (u, free):
            parameter.grad.nan_to_num_(0.0, 0.0, 0.0)
        torch.nn.utils.clip_grad_norm_([u, free], 10 * math.sqrt(dim))
        optimizer.param_groups[0]["lr"] = lr * 0.5 * (1 + math.cos(math.pi * step / steps)) + 1e-5
        optimizer.step()
        if 2 * step >= steps:
            weight = 1 / (step - steps // 2 + 1)
            for kept, parameter in zip(average, (u, free), strict=True):
                kept.lerp_(parameter.detach(), weight)
    ends = [(u.detach(), free.detach()), (average[0], average[1])]
    return [(mean + root @ at, root @ factor(values)) for at, values in ends]


def log_ratios(q: CholeskyGaussian, log_joint: Callable[[Tensor], Tensor], draws: int, seed: int = 12345) -> Tensor:
    """log p - log q at draws that are the same whitened ones for every q, (draws,), but for ½|z|²."""
    z = torch.randn(draws, q.dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    with torch.no_grad():
        values = torch.cat([log_joint(q.push_noise(part)) for part in z.split(2048)])
    return values + q.entropy().detach()


def long_run(
    q: CholeskyGaussian, log_joint: Callable[[Tensor], Tensor], steps: int = 2000, draws: int = 16_384
) -> tuple[str, float, float, int]:
    """The best of three long runs: from where, by how many nats better than q, its standard error, and gradients."""
    mean, root, dim = q.mean.detach().clone(), q.scale_tril.detach().clone(), q.dim
    none, away = torch.zeros_like(mean), torch.randn(dim, generator=torch.Generator().manual_seed(1)).double()
    runs = {
        "the end of the fit": adam(log_joint, mean, root, none, 1.0, steps=steps, lr=0.005),
        "away from it": adam(log_joint, mean, root, 2 * away, 2.0, steps=steps),
        "N(0, I)": adam(log_joint, none, torch.eye(dim, dtype=torch.float64), none, 1.0, steps=steps),
    }
    here, found = log_ratios(q, log_joint, draws), []
    for name, ends in runs.items():
        for at, factor in ends:
            try:
                other = CholeskyGaussian(dim, dtype=torch.float64).initialize_(at, factor)
            except ValueError:  # no numbers of a Gaussian
                continue
            gain = log_ratios(other, log_joint, draws) - here
            if bool(gain.isfinite().all()):
                found.append((name, float(gain.mean()), float(gain.std()) / math.sqrt(draws)))
    name, gain, error = max(found, key=lambda one: one[1])
    return name, gain, error, len(runs) * steps * 64
