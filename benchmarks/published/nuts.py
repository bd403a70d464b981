"""True moments by NUTS where quadrature does not reach, kept in `moments.json`.

    python -m benchmarks.published --nuts [--only NAMES]

Pyro's NUTS in float64, 700 steps of warm-up, acceptance 0.9, a full mass matrix below 20 coordinates, each chain from a
draw of the Gaussian fit.  R-hat is the largest of the coordinates, the effective numbers of draws the smallest, those
of the coordinates and those of their squared deviations, by which an sd is known to about 1/sqrt(2 of it).
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.truths.target import Truth
from torchngvi import CholeskyGaussian, fit

from .mixtures import without_order
from .model import Model

KEPT = Path(__file__).with_name("moments.json")
RUNS = {  # chains, draws of each
    "cafés": (3, 1000),
    "sparse regression": (3, 1200),
    "mixture of 1000, ordered": (3, 1000),
    "mixture of 60, ordered": (3, 1500),
}
UNORDERED = {"mixture of 1000, ordered": "mixture of 1000, no order"}  # whose moments come with those of the ordered
WARM_UP = 700


def kept() -> dict[str, dict[str, Any]]:
    """The moments that are kept, by the name of the model."""
    return json.loads(KEPT.read_text()) if KEPT.exists() else {}


def truth(model: Model) -> Truth:
    """The moments of a model by NUTS; the error is that of a mean."""
    found = kept()[model.name]
    mean, sd = (torch.tensor(found[key], dtype=torch.float64) for key in ("mean", "sd"))
    return Truth(mean, sd, found["ess"] ** -0.5, float("nan"))


def told(name: str) -> str:
    """In words: how well the moments are known."""
    found = kept()[name]
    draws = f"{found['ess']} effective draws ({found['ess_of_squares']} of squares)"
    return f"NUTS, R-hat {found['r_hat']:.4f}, {draws}"


def chains(model: Model, count: int, draws: int) -> Tensor:
    """Draws (chains, draws, D)."""
    import pyro
    from pyro.infer import MCMC, NUTS

    torch.manual_seed(0)
    q = CholeskyGaussian(model.dim, dtype=torch.float64)
    fit(q, model.log_joint, progress=False, examine=False)
    found = []
    for chain in range(count):
        pyro.set_rng_seed(100 + chain)
        start = q.mean + q.stddev * torch.randn(model.dim, dtype=torch.float64)
        kernel = NUTS(
            potential_fn=lambda sites: -model.log_joint(sites["theta"][None])[0],
            target_accept_prob=0.9,
            full_mass=model.dim < 20,
        )
        run = MCMC(kernel, draws, WARM_UP, initial_params={"theta": start}, disable_progbar=True)
        run.run()
        found.append(run.get_samples()["theta"])
    return torch.stack(found)


def moments(draws: Tensor) -> dict[str, Any]:
    """What is kept of draws (chains, draws, D)."""
    from pyro.ops.stats import effective_sample_size, gelman_rubin

    flat = draws.flatten(0, 1)
    square = (draws - flat.mean(0)).square()
    return {
        "r_hat": round(float(gelman_rubin(draws).max()), 5),
        "ess": round(float(effective_sample_size(draws).min())),
        "ess_of_squares": round(float(effective_sample_size(square).min())),
        "chains": list(draws.shape[:2]),
        **_written(flat),
    }


def _written(flat: Tensor) -> dict[str, list[float]]:
    """Means and sds to six digits."""
    return {
        "mean": [float(f"{x:.6g}") for x in flat.mean(0).tolist()],
        "sd": [float(f"{x:.6g}") for x in flat.std(0).tolist()],
    }


def keep(name: str, draws: Tensor) -> None:
    """Write the moments of a model, and those of the one that comes with it."""
    every = kept()
    every[name] = moments(draws)
    if name in UNORDERED:
        every[UNORDERED[name]] = every[name] | _written(without_order(draws.flatten(0, 1)))
    KEPT.write_text(json.dumps(every, indent=1, ensure_ascii=False) + "\n")
    print(f"{name}: {told(name)}", flush=True)


def remake(models: list[Model]) -> None:
    """Run NUTS for each model that has no other truth, and keep its moments."""
    for model in models:
        if model.name in RUNS:
            keep(model.name, chains(model, *RUNS[model.name]))
