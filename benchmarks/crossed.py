"""Several grouping factors: seconds, and posteriors beside long Hamiltonian chains over all coordinates.

    python benchmarks/crossed.py                                  # all sets beside chains, some five minutes
    python benchmarks/crossed.py salamander poisson               # these alone
    python benchmarks/crossed.py gaussian 10000 200 100000        # seconds: family, subjects, items, rows
    python benchmarks/crossed.py edge bernoulli 25                # k-hat of so many tables without spread

The chains are 64 of 1,500 states of 8 leapfrog steps, in the frame of the best Gaussian; errors are in their sds.  One
thread, float64.
"""

import math
import resource
import sys
import time

import torch
from torch import Tensor

from torchngvi.tables.design import design_of_arrays
from torchngvi.tables.families import family_of
from torchngvi.tables.globals import FitSettings, SeveralPosterior, integrate
from torchngvi.tables.parts import Coordinates
from torchngvi.tables.priors import settle

CHAINS, STATES, STEPS, BURN = 64, 1500, 8, 0.15
Data = tuple[Tensor, Tensor, dict[str, tuple[Tensor, Tensor]]]


def outcome(eta: Tensor, family: str, generator: torch.Generator) -> Tensor:
    """Targets with these linear predictors."""
    if family == "gaussian":
        return eta + 0.6 * torch.randn(eta.shape, generator=generator, dtype=torch.float64)
    if family == "bernoulli":
        return (torch.rand(eta.shape, generator=generator, dtype=torch.float64) < eta.sigmoid()).double()
    return torch.poisson(eta.exp(), generator=generator)


def salamander(rows: int = 120, seed: int = 0) -> Data:
    """Females by males, 20 by 20, crossed, standard deviations of 1, as the salamanders of McCullagh and Nelder."""
    generator, per = torch.Generator().manual_seed(seed), rows // 20
    female = torch.arange(20).repeat_interleave(per)
    male = torch.cat([torch.randperm(20, generator=generator)[:per] for _ in range(20)])
    x, z = (female % 2).double(), (male % 2).double()
    X = torch.stack([torch.ones_like(x), x, z, x * z], 1)
    b, c = (torch.randn(20, generator=generator).double() for _ in range(2))
    eta = X @ torch.tensor([1.0, -3.0, -0.7, 3.6]).double() + b[female] + c[male]
    return X, outcome(eta, "bernoulli", generator), {"female": (X[:, :1], female), "male": (X[:, :1], male)}


def crossed(
    family: str, subjects: int, items: int, rows: int, slope: bool = False, seed: int = 3, sd: float = 0.8
) -> Data:
    """Subjects by items at random, perhaps with a slope of each subject; the sd of items is 3/4 of that of subjects."""
    generator = torch.Generator().manual_seed(seed)
    subject, item = torch.arange(rows) % subjects, torch.randint(0, items, (rows,), generator=generator)
    item[:items] = torch.arange(items)
    x = torch.randn(rows, generator=generator, dtype=torch.float64)
    X = torch.stack([torch.ones_like(x), x], 1)
    b, c = (torch.randn(n, 2, generator=generator, dtype=torch.float64) for n in (subjects, items))
    eta = 0.5 + 0.3 * x + sd * b[subject, 0] + 0.75 * sd * c[item, 0] + (0.4 * b[subject, 1] * x if slope else 0.0)
    y = outcome(eta, family, generator)
    return X, y, {"subject": (X if slope else X[:, :1], subject), "item": (X[:, :1], item)}


def nested(family: str) -> Data:
    """Three rows of each of 200 pupils in 40 classes in 10 schools."""
    generator = torch.Generator().manual_seed(1)
    pupil = torch.arange(600) // 3
    classes, school = pupil // 5, pupil // 20
    x = torch.randn(600, generator=generator, dtype=torch.float64)
    X = torch.stack([torch.ones_like(x), x], 1)
    pupils, rooms, schools = (torch.randn(n, generator=generator, dtype=torch.float64) for n in (200, 40, 10))
    eta = 0.2 + 0.5 * x + 0.7 * pupils[pupil] + 0.5 * rooms[classes] + 0.6 * schools[school]
    one = X[:, :1]
    return X, outcome(eta, family, generator), {"pupil": (one, pupil), "class": (one, classes), "school": (one, school)}


SETS = {
    "salamander": ("bernoulli", lambda: salamander()),
    "salamander 360": ("bernoulli", lambda: salamander(360, 1)),
    "bernoulli": ("bernoulli", lambda: crossed("bernoulli", 60, 12, 600)),
    "slope": ("bernoulli", lambda: crossed("bernoulli", 60, 12, 600, True)),
    "poisson": ("poisson", lambda: crossed("poisson", 60, 12, 300)),
    "penicillin": ("gaussian", lambda: crossed("gaussian", 24, 6, 144)),
    "nested": ("bernoulli", lambda: nested("bernoulli")),
    "nested gaussian": ("gaussian", lambda: nested("gaussian")),
}


def fitted(family: str, data: Data, draws: int | None = None) -> tuple[SeveralPosterior, float]:
    """The posterior, and the seconds of the processor that it took."""
    design, kind = design_of_arrays(*data), family_of(family)
    kind = kind.settled(kind.checked(design.y), design.weights, design.offset)
    coordinates = Coordinates(design, len(kind.parameters))
    begun = time.process_time()
    priors = settle(design, kind, coordinates, None)
    found = integrate(design, kind, coordinates, priors, FitSettings().asked(draws=draws), 0, False)
    assert isinstance(found, SeveralPosterior)
    return found, time.process_time() - begun


def readable(posterior: SeveralPosterior, theta: Tensor) -> Tensor:
    """Coefficients, standard deviations, correlations on Fisher's scale, and parameters of the likelihood."""
    a, xis, phi = posterior.coordinates.split(theta)
    pairs = zip(xis, posterior.coordinates.sizes, strict=True)
    return torch.cat([a, *[torch.cat([xi[..., :r].exp(), xi[..., r:]], -1) for xi, r in pairs], phi.exp()], -1)


def sampled(posterior: SeveralPosterior) -> tuple[Tensor, float]:
    """What is readable of the states of the chains, (states, chains, ..), and the largest split R-hat."""
    joint, frame, P = posterior.joint, posterior.frame, len(posterior.mode)
    generator, root = torch.Generator().manual_seed(0), torch.linalg.cholesky(frame.root @ frame.root.mT)

    def energy(x: Tensor) -> Tensor:
        theta, u = frame.theta + x[:, :P] @ root.mT, x[:, P:]
        of = joint._linear(theta)
        eta = of.fixed + joint.arranged.predictor(of.designs, u)
        log_p = joint.family.log_prob(eta.mT, tuple(part[:, None] for part in joint.y), of.phi)
        return 0.5 * u.square().sum(-1) - (joint.weights @ log_p) - joint.priors.log_prob(theta)

    def gradient(x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_()
        value = energy(x)
        return value.detach(), torch.autograd.grad(value.sum(), x)[0]

    x = 0.5 * torch.randn(CHAINS, P + joint.arranged.dim, generator=generator, dtype=torch.float64)
    x[:, P:] += frame.effects[:, 0, 0]
    value, force = gradient(x)
    size, kept = 0.2, []
    for state in range(STATES):
        p = torch.randn(x.shape, generator=generator, dtype=torch.float64)
        step = size * (0.6 + 0.8 * float(torch.rand((), generator=generator)))
        new, there, here = x, force, value + 0.5 * p.square().sum(-1)
        for _ in range(STEPS):
            p = p - 0.5 * step * there
            new = new + step * p
            after, there = gradient(new)
            p = p - 0.5 * step * there
        chance = (here - after - 0.5 * p.square().sum(-1)).exp().clamp_max(1).nan_to_num(0.0)
        yes = torch.rand(CHAINS, generator=generator) < chance
        x, force = torch.where(yes[:, None], new, x), torch.where(yes[:, None], there, force)
        value = torch.where(yes, after, value)
        if state < BURN * STATES:
            size *= math.exp(0.05 * (float(chance.mean()) - 0.8))
        else:
            kept.append(readable(posterior, frame.theta + x[:, :P] @ root.mT))
    states = torch.stack(kept[len(kept) % 2 :])
    halves = torch.cat(states.chunk(2), 1)
    within = halves.var(0).mean(0)
    return states, float(((within + halves.mean(0).var(0)) / within).sqrt().max())


def beside(names: list[str]) -> None:
    """Print errors of means, and ratios of sds, beside the chains."""
    for name in names:
        family, data = SETS[name]
        posterior, seconds = fitted(family, data())
        states, r_hat = sampled(posterior)
        truth = states.flatten(0, 1)
        for draws in (None, 4096):
            if draws is not None:
                posterior, seconds = fitted(family, data(), draws)
            weighted = posterior.weighted
            x = readable(posterior, weighted.theta)
            mean = weighted.weights @ x
            sd = (weighted.weights @ (x - mean).square()).sqrt()
            error = ", ".join(f"{e:.2f}" for e in (mean - truth.mean(0)) / truth.std(0))
            ratio = ", ".join(f"{e:.2f}" for e in sd / truth.std(0))
            print(
                f"{name}, {len(x)} draws: {seconds:.2f} s, k-hat {weighted.k_hat:.2f}, {weighted.effective:.0f} "
                f"effective, R-hat of the chains {r_hat:.3f}\n  errors of means {error}\n  ratios of sds {ratio}"
            )


def edge(family: str, count: int) -> None:
    """Print k-hat, effective draws, lower ends and coverage of a slope where there is no spread."""
    k_hat, effective, lower, covered, seconds = [], [], [], 0, 0.0
    for seed in range(count):
        posterior, took = fitted(family, crossed(family, 20, 8, 160, seed=100 + seed, sd=0.0))
        weighted = posterior.weighted
        draws = posterior.coordinates.to_user(weighted.resampled(2000, torch.Generator().manual_seed(0)))
        low, high = draws.coefficients[:, 1].quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
        covered += low < 0.3 < high
        lower.append([float(sd.quantile(0.025)) for sd in draws.sd])
        k_hat.append(weighted.k_hat)
        effective.append(weighted.effective)
        seconds += took / count
    ends = torch.tensor(lower)
    print(
        f"{family}, {count} tables without spread: k-hat at most {max(k_hat):.2f}, at least {min(effective):.0f} "
        f"effective; lower ends {ends.median(0)[0].tolist()} in the median, {ends.amax(0).tolist()} at most; coverage "
        f"of the slope {covered / count:.2f}; {seconds:.2f} s a table"
    )


def main() -> None:
    """Run what was asked for."""
    torch.set_num_threads(1)
    torch.linalg.eigh(torch.eye(2))  # what is loaded at the first use
    asked = sys.argv[1:]
    if asked[:1] == ["edge"]:
        edge(asked[1], int(asked[2]))
    elif len(asked) == 4 and asked[1].isdigit():
        subjects, items, rows = map(int, asked[1:])
        posterior, seconds = fitted(asked[0], crossed(asked[0], subjects, items, rows))
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(f"{' x '.join(asked)}: {seconds:.1f} s of the processor, at most {most:.2f} GB; {posterior.method}")
    else:
        beside(asked or list(SETS))


if __name__ == "__main__":
    main()
