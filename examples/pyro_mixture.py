"""A mixture of two Gaussians in Pyro: assignments are enumerated and summed out, then read off again.

    python examples/pyro_mixture.py [--out pyro_mixture.png]

The model and the five points of Pyro's tutorial on mixtures.
"""

import argparse

import pyro
import pyro.distributions as dist
import torch
from matplotlib.figure import Figure
from pyro import poutine
from pyro.infer import TraceEnum_ELBO, config_enumerate, infer_discrete
from pyro.infer.autoguide import init_to_value

from torchngvi.adapters.pyro import AutoGaussian, fit_guide

DATA = torch.tensor([0.0, 1.0, 10.0, 11.0, 12.0])


@config_enumerate
def model(data):
    weights = pyro.sample("weights", dist.Dirichlet(0.5 * torch.ones(2)))
    scale = pyro.sample("scale", dist.LogNormal(0.0, 2.0))
    with pyro.plate("components", 2):
        locs = pyro.sample("locs", dist.Normal(0.0, 10.0))
    with pyro.plate("data", len(data)):
        assignment = pyro.sample("assignment", dist.Categorical(weights))
        pyro.sample("obs", dist.Normal(locs[assignment], scale), obs=data)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="pyro_mixture.png")
    options = parser.parse_args(arguments)

    pyro.set_rng_seed(0)
    # the components may be exchanged: the start chooses between two equal modes
    guide = AutoGaussian(model, init_loc_fn=init_to_value(values={"locs": torch.tensor([0.0, 10.0])}))
    result = fit_guide(model, guide, DATA, options={"progress": False})
    print(result)
    loss = TraceEnum_ELBO(max_plate_nesting=1, num_particles=500).loss(model, guide, DATA)
    print(f"TraceEnum_ELBO on the same guide: {loss:.2f}")

    median = guide.median()
    print({name: [round(x, 2) for x in value.reshape(-1).tolist()] for name, value in median.items()})
    fixed = poutine.condition(model, data=median)
    assignment = poutine.trace(infer_discrete(fixed, temperature=0, first_available_dim=-2)).get_trace(DATA)
    labels = assignment.nodes["assignment"]["value"]
    print("assignments", labels.tolist())

    x = torch.linspace(-4, 16, 400)
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot()
    for k in range(2):
        density = median["weights"][k] * dist.Normal(median["locs"][k], median["scale"]).log_prob(x).exp()
        axes.plot(x, density, color=f"C{k}")
        axes.plot(DATA[labels == k], torch.zeros(int((labels == k).sum())), "o", color=f"C{k}", clip_on=False)
    axes.set_xlabel("data")
    axes.set_ylabel("weighted density")
    axes.set_ylim(0)
    figure.savefig(options.out, dpi=120)
    return result, labels, loss


if __name__ == "__main__":
    main()
