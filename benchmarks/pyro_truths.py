"""Pyro's NUTS on the log joint of a Pyro model within a limit of time, and what it says of a fit and of its verdict.

One chain from the mean of a fit, 300 draws of warm-up and 300 more or as many as are asked for, on the log joint of
one θ compiled by `torch.jit.trace`, which is 2 to 4 times as fast as the model itself.  R-hat is that of the two halves
of the chain, the largest over θ, and the effective numbers of draws the smallest, of θ and of its squared deviations.
A chain that is cut off in its warm-up is no truth; of one cut off later the draws so far are.

Whether a fit is right, wrong or far off is said by `benchmarks.verdicts`, from its worst mean and worst sd.  A chain
has errors of its own, 1/√ESS of a mean and 1/√(2 ESS) of an sd: each error of the fit is taken two of these smaller,
and two larger, and where the two lead to different words the verdict is "open".
"""

import json
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import pyro
import torch
from pyro.infer import NUTS
from pyro.ops.stats import effective_sample_size, split_gelman_rubin
from torch import Tensor

from benchmarks.verdicts import quality
from torchngvi.adapters.pyro import ModelLogJoint
from torchngvi.diagnostics import Verdict
from torchngvi.posteriors.gaussian import Gaussian

WARM_UP = 300
FEWEST = 50  # of a chain that is cut off
MIXED = 1.1  # R-hat above which a chain is no truth


class Truth(NamedTuple):
    """What is kept of a chain."""

    mean: Tensor  # (D,)
    sd: Tensor  # (D,)
    ess: Tensor  # (D,)
    ess_of_squares: Tensor  # (D,)
    r_hat: float
    draws: int
    seconds: float  # of CPU
    gradients: int
    start: float  # the log joint at the initial θ, by which the data are known

    def __str__(self) -> str:
        ess = f"ESS {self.ess.min():.0f} ({self.ess_of_squares.min():.0f} of squares)"
        return f"{self.draws} draws, R-hat {self.r_hat:.3f}, {ess}, {self.gradients} gradients, {self.seconds:.0f} s"


def compiled(density: ModelLogJoint) -> Any:
    """The potential of one θ (D,), compiled; the model itself where that cannot be."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of constants in the trace, and of the compiler's age
            traced = torch.jit.trace(density.one, density.initial, check_trace=False)
        other = density.initial + 0.1 * torch.randn_like(density.initial)
        same = torch.allclose(traced(other), density(other))
    except RuntimeError:  # it writes into tensors, or branches on one
        same = False
    run = traced if same else density.one
    return lambda sites: -run(sites["theta"])


def chain(density: ModelLogJoint, start: Tensor, seconds: float, count: int) -> Truth | str:
    """A truth from one chain of so many draws, or how far it came within so many seconds of CPU."""
    pyro.set_rng_seed(0)
    begun, gradients, draws = time.process_time(), 0, []
    potential = compiled(density)

    def counted(sites: dict[str, Tensor]) -> Tensor:
        nonlocal gradients
        gradients += 1
        return potential(sites)

    kernel = NUTS(potential_fn=counted)
    kernel.initial_params = {"theta": start.clone()}
    kernel.setup(WARM_UP)
    sites = kernel.initial_params
    for step in range(WARM_UP + count):
        if time.process_time() - begun > seconds:
            if len(draws) < FEWEST:
                return f"{min(step, WARM_UP)} of {WARM_UP} of the warm-up and {len(draws)} draws within {seconds:.0f} s"
            break
        sites = kernel.sample(sites)
        if step >= WARM_UP:
            draws.append(sites["theta"].detach())
    return _truth(torch.stack(draws), time.process_time() - begun, gradients, density)


@torch.no_grad()
def _truth(draws: Tensor, seconds: float, gradients: int, density: ModelLogJoint) -> Truth:
    """Of draws (S, D)."""
    even = draws[None, len(draws) % 2 :]
    square = (even - even.mean(1)).square()
    return Truth(
        draws.mean(0),
        draws.std(0),
        effective_sample_size(even),
        effective_sample_size(square),
        float(split_gelman_rubin(even).max()),
        len(draws),
        seconds,
        gradients,
        float(density(density.initial)),
    )


def kept(path: Path | None, name: str, density: ModelLogJoint) -> Truth | None:
    """The truth of a model from a file, if it has one of these data."""
    found = json.loads(path.read_text()).get(name) if path is not None and path.exists() else None
    if found is None:
        return None
    with torch.no_grad():
        start = float(density(density.initial))
    if abs(found["start"] - start) > 1e-6 * abs(start):
        raise SystemExit(f"{path} has a truth of {name} for other data; give another file.")
    return Truth(*(density.initial.new_tensor(x) if isinstance(x, list) else x for x in found.values()))


def keep(path: Path, name: str, truth: Truth) -> None:
    """Write the truth of a model into the file."""
    every = json.loads(path.read_text()) if path.exists() else {}
    every[name] = {
        key: [float(f"{x:.6g}") for x in value.tolist()] if isinstance(value, Tensor) else value
        for key, value in truth._asdict().items()
    }
    path.write_text(json.dumps(every) + "\n")


# ------------------------------------------------------------------------------------ what it says of a fit


def spoken(word: str, level: str) -> str:
    """Whether a verdict is true of a fit that is right, wrong or far off.

    >>> [spoken(*each) for each in (("fits", "right"), ("fits", "wrong"), ("about right", "far off"))]
    ['true', 'false: missed', 'false: missed']
    >>> [spoken(*each) for each in (("does not fit", "right"), ("about right", "wrong"), ("does not fit", "wrong"))]
    ['false: an alarm', 'true', 'true']
    """
    if level == "right":
        return "false: an alarm" if word == "does not fit" else "true"
    missed = word == "fits" or (word == "about right" and level == "far off")
    return "false: missed" if missed else "true"


@torch.no_grad()
def against(truth: Truth, q: Gaussian, verdict: Verdict | None) -> str:
    """The errors of q, and whether its verdict is true."""
    mean = (q.mean - truth.mean).abs() / truth.sd
    sd = (q.stddev / truth.sd).log()
    worst = sd[sd.abs().argmax()]
    line = f"means {mean.max():.2f} sd, sds by a factor {worst.exp():.2f}"
    if truth.r_hat > MIXED:
        return f"{line}; the chain has not mixed, so that the verdict is open"
    noise = 2 * truth.ess.rsqrt(), 2 * (2 * truth.ess_of_squares).rsqrt()
    pairs = (sd.abs(), noise[1]), (mean, noise[0])
    least, most = (
        quality(*(max(float((error + sign * each).max()), 0.0) for error, each in pairs)) for sign in (-1, 1)
    )
    level = least if least == most else f"between {least} and {most}"
    if verdict is None or verdict.word not in ("fits", "about right", "does not fit"):
        return f"{line}: {level}; no verdict"
    words = {spoken(verdict.word, each) for each in (least, most)}
    return f'{line}: {level}; the verdict "{verdict.word}" is {words.pop() if len(words) == 1 else "open"}'
