"""Long chains on a Pyro model, in coordinates that mix, as truths for fits of it.

Many chains of Hamiltonian Monte Carlo go at once, as the log joint takes all their positions in one call; one chain of
Pyro's NUTS, `nuts`, takes some thirty times as long for as many effective draws, and is for comparison.  The chains may
see another model of the same density: `non_centred` writes location-scale sites of groups in standard ones.  A Gaussian
fitted to that, and then the draws of the warm-up, whiten its coordinates, and each draw is mapped back to the model as
it is.  R-hat is of the halves of all chains, the largest over θ, and the effective numbers of draws are the smallest,
of θ and of its squared deviations.
"""

import json
import math
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyro
import torch
from pyro import poutine
from pyro.infer import NUTS
from pyro.infer.reparam import LocScaleReparam
from pyro.ops.stats import effective_sample_size, split_gelman_rubin
from torch import Tensor

from torchngvi.adapters.pyro import AutoGaussian, ModelLogJoint, fit_guide, log_joint
from torchngvi.models.factors import Guarded

CHAINS, WARM_UP = 32, 250
ACCEPTED, LENGTH, MOST = 0.8, 5.0, 50  # what the step aims at, and the longest path, in sds and in steps
MIXED, ENOUGH = 1.02, 400  # R-hat above which, and effective draws below which, chains are no truth


class Truth(NamedTuple):
    """What is kept of the chains of a model."""

    mean: Tensor  # (D,)
    sd: Tensor  # (D,)
    r_hat: float
    ess: float  # the smallest
    ess_of_squares: float
    draws: int  # of all chains
    gradients: int
    seconds: float  # of CPU
    start: float  # the log joint at one θ, by which the data are known

    @property
    def sure(self) -> bool:
        """Whether fits can be held to it."""
        return self.r_hat <= MIXED and min(self.ess, self.ess_of_squares) >= ENOUGH

    def __str__(self) -> str:
        ess = f"ESS {self.ess:.0f} ({self.ess_of_squares:.0f} of squares)"
        return f"{self.draws} draws, R-hat {self.r_hat:.3f}, {ess}, {self.gradients} gradients, {self.seconds:.0f} s"


# ------------------------------------------------------------------------------------ the chains


class Chains:
    """Chains that move in z, θ = mean + root z, by paths of random length whose step adapts to what is accepted."""

    def __init__(self, density: ModelLogJoint, mean: Tensor, root: Tensor, count: int) -> None:
        self.density, self.mean, self.root = Guarded(density), mean, root  # a model may raise where a scale underflows
        self.z = torch.randn(count, density.dim, dtype=mean.dtype)
        self.step, self.gradients = 0.5 / density.dim**0.25, 0
        self.value, self.slope = self.at(self.z)
        far = ~self.value.isfinite()
        if bool(far.any()):  # begin where the density is positive
            self.z[far] = 0.0
            self.value, self.slope = self.at(self.z)

    @property
    def theta(self) -> Tensor:
        """Where the chains are, (chains, D)."""
        return self.mean + self.z @ self.root.mT

    def at(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """The log joint of each chain, -inf where it is not finite, and its slope in z."""
        z = z.detach().requires_grad_()
        value = self.density.log_joint(self.mean + z @ self.root.mT)
        (slope,) = torch.autograd.grad(value.sum(), z)
        self.gradients += len(z)
        return value.detach().nan_to_num(*[-math.inf] * 3), slope.nan_to_num(0.0, 0.0, 0.0)

    def move(self, adapt: float = 0.0) -> None:
        """One path of each chain, kept or not; log step changes by so much times what is accepted too often."""
        momentum = torch.randn_like(self.z)
        before = self.value - 0.5 * momentum.square().sum(-1)
        z, value, slope = self.z, self.value, self.slope
        steps = LENGTH * (0.2 + 0.8 * float(torch.rand(()))) / self.step
        for _ in range(int(min(max(steps, 1.0), MOST))):
            momentum = momentum + 0.5 * self.step * slope
            z = z + self.step * momentum
            value, slope = self.at(z)
            momentum = momentum + 0.5 * self.step * slope
        share = (value - 0.5 * momentum.square().sum(-1) - before).nan_to_num(-math.inf).clamp_max(0.0).exp()
        taken = torch.rand_like(share) < share
        self.z, self.slope = (torch.where(taken[:, None], *pair) for pair in ((z, self.z), (slope, self.slope)))
        self.value = torch.where(taken, value, self.value)
        self.step = min(self.step * math.exp(adapt * (float(share.mean()) - ACCEPTED)), 1.0)

    def whiten(self, draws: Tensor) -> None:
        """Change z to what makes these draws of θ (S, D) standard."""
        theta, self.mean = self.theta, draws.mean(0)
        self.root = torch.linalg.cholesky(draws.T.cov())
        self.z = torch.linalg.solve_triangular(self.root, (theta - self.mean).mT, upper=False).mT
        self.value, self.slope = self.at(self.z)


def run(chains: Chains, count: int, seconds: float, warm_up: int = WARM_UP) -> Tensor | str:
    """Draws (chains, count, D) after a warm-up in two parts, or how far it came within so many seconds of CPU."""
    begun, draws = time.process_time(), list[Tensor]()
    for part, length in enumerate((warm_up, warm_up // 2, count)):
        draws.clear()
        for step in range(length):
            if time.process_time() - begun > seconds:
                return f"{len(draws)} draws a chain in part {part} within {seconds:.0f} s"
            chains.move(0.0 if part == 2 else 1.0 / (1 + step) ** 0.5)
            draws.append(chains.theta)
        if part == 0:
            chains.whiten(torch.cat(draws[length // 2 :]))
    return torch.stack(draws, 1)


def nuts(density: ModelLogJoint, start: Tensor, count: int, warm_up: int = 300, seed: int = 0) -> Tensor:
    """The draws (1, count, D) of one chain of Pyro's NUTS from θ = start."""
    pyro.set_rng_seed(seed)
    kernel = NUTS(potential_fn=lambda sites: -density.one(sites["theta"]))
    kernel.initial_params = {"theta": start.clone()}
    kernel.setup(warm_up)
    sites, draws = kernel.initial_params, []
    for _ in range(warm_up + count):
        sites = kernel.sample(sites)
        draws.append(sites["theta"].detach())
    return torch.stack(draws[warm_up:])[None]


def non_centred(model: Callable[..., Any], sites: Sequence[str]) -> Callable[..., Any]:
    """The model with these location-scale sites in standard coordinates."""
    return poutine.reparam(model, {site: LocScaleReparam(0.0) for site in sites}) if sites else model


def truth_of(
    model: Callable[..., Any], sites: Sequence[str], seconds: float, count: int, chains: int = CHAINS
) -> Truth | str:
    """The truth from chains of so many draws each, which see these sites non-centred, or why there is none."""
    begun, density = time.process_time(), log_joint(model)
    other = non_centred(model, sites)
    guide, seen = AutoGaussian(other), log_joint(other)
    pyro.set_rng_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit_guide(other, guide, options={"progress": False, "max_seconds": seconds / 20})
    q = guide.get_posterior()
    moving = Chains(seen, q.mean.detach(), q.scale_tril.detach(), chains)
    draws = run(moving, count, seconds)
    if isinstance(draws, str):
        return draws
    if sites:
        draws = mapped(draws, seen, density)
    return summary(draws, density, moving.gradients, time.process_time() - begun)


@torch.no_grad()
def mapped(theta: Tensor, seen: ModelLogJoint, density: ModelLogJoint) -> Tensor:
    """θ (chains, S, D) of the model as it is, from that of the one that the chains see."""

    def one(theta: Tensor) -> Tensor:
        nodes = poutine.trace(poutine.condition(seen.model, seen.unpack(theta))).get_trace().nodes
        return density.pack({site.name: nodes[site.name]["value"] for site in density.layout.sites})

    every = theta.flatten(0, 1)
    with pyro.validation_enabled(False):
        try:
            other = torch.func.vmap(one, randomness="different")(every)
        except RuntimeError:  # a distribution that assigns in place, as OrderedLogistic
            other = torch.stack([one(each) for each in every])
    return other.view(theta.shape)


# ------------------------------------------------------------------------------------ what is kept


@torch.no_grad()
def summary(draws: Tensor, density: ModelLogJoint, gradients: int = 0, seconds: float = 0.0) -> Truth:
    """The truth of draws (chains, S, D)."""
    flat = draws.flatten(0, 1)
    return Truth(
        flat.mean(0),
        flat.std(0),
        float(split_gelman_rubin(draws).max()),
        float(effective_sample_size(draws).min()),
        float(effective_sample_size((draws - flat.mean(0)).square()).min()),
        len(flat),
        gradients,
        seconds,
        _at_one_point(density),
    )


@torch.no_grad()
def _at_one_point(density: ModelLogJoint) -> float:
    """The log joint at a θ that is the same each time, as the initial one is not."""
    return float(density(torch.full_like(density.initial, 0.1)))


def kept(path: Path, name: str, density: ModelLogJoint) -> Truth | None:
    """The truth of a model from a file, if it has one of these data."""
    found = json.loads(path.read_text()).get(name) if path.exists() else None
    if found is None:
        return None
    start = _at_one_point(density)
    if abs(found["start"] - start) > 1e-6 * max(abs(start), 1.0):
        raise SystemExit(f"{path} has a truth of {name} for other data; give another file.")
    mean, sd = (
        density.initial.new_tensor([x for site in found["sites"].values() for x in site[key]]) for key in ("mean", "sd")
    )
    return Truth(mean, sd, **{key: value for key, value in found.items() if key != "sites"})


def keep(path: Path, name: str, truth: Truth, density: ModelLogJoint) -> None:
    """Write the truth of a model into the file, by site, in unconstrained coordinates."""
    every = json.loads(path.read_text()) if path.exists() else {}
    sites = {
        site.name: {
            key: [float(f"{x:.8g}") for x in getattr(truth, key)[site.where].tolist()] for key in ("mean", "sd")
        }
        for site in density.layout.sites
    }
    rest = {key: round(value, 3) for key, value in truth._asdict().items() if key not in ("mean", "sd", "start")}
    every[name] = {"sites": sites, **rest, "start": truth.start}
    lines = (f"{json.dumps(key)}: {json.dumps(value)}" for key, value in sorted(every.items()))
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
