"""Crossed models beside Hamiltonian Monte Carlo: python benchmarks/multilevel_truths.py [family] [iterations].

60 subjects and 12 items in 600 rows, an intercept and a slope of each subject and an intercept of each item; sixteen
chains over all coordinates, a learned parameter among them, in the frame of the best Gaussian, whose log joint they
need and nothing else.  Errors of means are in posterior standard deviations.
"""

import sys
import time

import torch
from torch import Tensor

from torchngvi import MixedModel
from torchngvi.models import MixedPrior
from torchngvi.models.mixed_prior import scales_of

CHAINS, STEPS, SIZE = 16, 8, 0.22


def data(family: str, seed: int = 3) -> tuple[Tensor, ...]:
    """Designs, targets and groups."""
    generator = torch.Generator().manual_seed(seed)
    rows, subjects, items = 600, 60, 12
    subject, item = torch.arange(rows) % subjects, torch.randint(0, items, (rows,), generator=generator)
    item[:items] = torch.arange(items)
    x = torch.randn(rows, generator=generator).double()
    X = torch.stack([torch.ones_like(x), x], 1)
    b = torch.randn(subjects, 2, generator=generator).double() * torch.tensor([0.8, 0.4]).double()
    eta = 0.5 + 0.3 * x + b[subject, 0] + b[subject, 1] * x
    eta = eta + 0.6 * torch.randn(items, generator=generator).double()[item]
    if family == "bernoulli_logit":
        return X, (torch.rand(rows, generator=generator) < eta.sigmoid()).double(), subject, item
    gamma = torch._standard_gamma(torch.full((rows,), 2.0).double(), generator=generator) / 2
    rate = eta.exp() * (gamma if family == "negative_binomial" else 1.0)
    return X, torch.poisson(rate, generator=generator), subject, item


def sampled(model: MixedModel, result: object, iterations: int) -> Tensor:
    """Draws of all coordinates after a tenth of the iterations, (kept, chains, D)."""
    q, learned = result.joint, model.learned
    frame, generator = q.frame(), torch.Generator().manual_seed(0)
    rows, phi = model.rows, result.posterior.mean[-1:] if learned else None
    spread = result.posterior.variance[-1:].sqrt() if learned else None

    def at(x: Tensor) -> Tensor:
        theta = frame.mean + frame.push(x[:, : q.dim])
        return theta if learned is None else torch.cat([theta, phi + spread * x[:, q.dim :]], -1)

    def energy(x: Tensor) -> Tensor:
        theta = at(x)
        if learned is None:
            return -model.log_joint(theta)
        theta, value = theta[:, :-1], theta[:, -1]
        rows_energy = (rows.weights * learned.energy(rows.predictor(theta), rows.y, value[:, None])).sum(-1)
        prior = learned.prior_energy(value, learned.settled(rows.factors[0]))
        return rows_energy + model.prior_energy(theta) + prior

    def gradient(x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_()
        value = energy(x)
        return value.detach(), torch.autograd.grad(value.sum(), x)[0]

    x = torch.randn(CHAINS, q.dim + bool(learned), generator=generator).double()
    value, g = gradient(x)
    kept, accepted = [], 0.0
    for k in range(iterations):
        p = torch.randn(x.shape, generator=generator).double()
        size = SIZE * (0.7 + 0.6 * torch.rand((), generator=generator))
        new, force, here = x, g, value + 0.5 * p.square().sum(-1)
        for _ in range(STEPS):
            p = p - 0.5 * size * force
            new = new + size * p
            there, force = gradient(new)
            p = p - 0.5 * size * force
        yes = torch.rand(CHAINS, generator=generator) < (here - there - 0.5 * p.square().sum(-1)).exp()
        accepted += yes.double().mean().item() / iterations
        x, g = torch.where(yes[:, None], new, x), torch.where(yes[:, None], force, g)
        value = torch.where(yes, there, value)
        if k >= iterations // 10:
            kept.append(at(x).detach())
    print(f"accepted {accepted:.2f}")
    return torch.stack(kept)


def main() -> None:
    """Print the comparison."""
    torch.set_num_threads(1)
    family = sys.argv[1] if len(sys.argv) > 1 else "negative_binomial"
    iterations = int(sys.argv[2]) if len(sys.argv) > 2 else 3000
    X, y, subject, item = data(family)
    model = MixedModel(
        X, y, {"subject": (X, subject), "item": (X[:, :1], item)}, family, prior=MixedPrior(10.0, "kass-natarajan")
    )
    begun = time.process_time()
    result = model.fit(progress=False)
    print(f"{family}: {time.process_time() - begun:.1f} s of the processor; {result.method}")
    begun = time.process_time()
    draws = sampled(model, result, iterations)
    print(f"sampled in {time.process_time() - begun:.0f} s of the processor")
    rows, table = model.rows, result.summary()
    ours, truths = [], []
    for k in range(rows.p):
        ours.append((f"fixed {k}", table.fixed.mean[k], table.fixed.sd[k]))
        truths.append(draws[..., rows.beta][..., k])
    for name, at, of in zip(model.names, rows.omegas, rows.factors, strict=True):
        sd, correlation = scales_of(draws[..., at], of.r)
        for k in range(of.r):
            ours.append((f"sd of {name} {k}", table.random[name].sd.mean[k], table.random[name].sd.sd[k]))
            truths.append(sd[..., k])
        if of.r == 2:
            between = table.random[name].correlation
            ours.append((f"correlation of {name}", between.mean[0], between.sd[0]))
            truths.append(correlation[..., 0, 1])
    if model.learned is not None:
        ours.append((model.learned.name, table.likelihood.mean[0], table.likelihood.sd[0]))
        truths.append(draws[..., -1].exp())
    for (name, mean, sd), truth in zip(ours, truths, strict=True):
        own, spread = truth.mean(), truth.std()
        halves = torch.cat([truth[: len(truth) // 2], truth[len(truth) // 2 :]], 1)  # split R-hat
        between = halves.mean(0).var()
        within = halves.var(0).mean()
        r_hat = ((within + between) / within).sqrt()
        print(
            f"  {name:<24}{own:>9.3f}{spread:>8.3f}   error {(mean - own) / spread:>6.2f}"
            f"   sd ratio {sd / spread:>5.2f}   R-hat {r_hat:.3f}"
        )


if __name__ == "__main__":
    main()
