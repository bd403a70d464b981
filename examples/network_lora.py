"""Low-rank adapters: a posterior over the factors of an adapter, its likelihood compared with the point estimate's.

    python examples/network_lora.py [--steps 400] [--out network_lora.png]

A network that knows upright digits is adapted to mirrored ones with 150 images.  Every layer is W + BA with W frozen
(Hu et al. 2022), and q is over A and B, as IVON-LoRA does it for large language models (Cong et al. 2024).
"""

import argparse
import copy

import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import nn

import torchngvi as ngvi


class Adapted(nn.Module):
    """A linear layer that is frozen, and a change of low rank that is learned."""

    def __init__(self, layer, rank):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.layer(x) + self.up(self.down(x))


def train(model, optimizer, X, y, steps):
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        rows = torch.randint(len(y), (30,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(X[rows]), y[rows]).backward()
        optimizer.step()
        schedule.step()


def adapted(base, rank=4):
    torch.manual_seed(1)
    layers = [Adapted(part, rank) if isinstance(part, nn.Linear) else part for part in copy.deepcopy(base)]
    return nn.Sequential(*layers)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--out", default="network_lora.png")
    options = parser.parse_args(arguments)

    digits = load_digits()
    X, y = torch.tensor(digits.images, dtype=torch.float32) / 16, torch.tensor(digits.target)
    mirrored = X.flip(2).flatten(1)
    torch.manual_seed(0)
    base = nn.Sequential(*(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 10)))
    train(base, torch.optim.AdamW(base.parameters(), lr=3e-3), X.flatten(1)[:900], y[:900], 400)
    parts = [slice(900, 1050), slice(1050, 1200), slice(1200, 1797)]
    (few, labels), validation, (test, answers) = ((mirrored[part], y[part]) for part in parts)

    points = {}  # the learning rate of the point estimate is chosen on the validation part
    for lr in (1e-3, 3e-3, 1e-2):
        model = adapted(base)
        train(model, torch.optim.AdamW(model.parameters(), lr=lr), few, labels, options.steps)
        with torch.no_grad():
            points[nn.functional.cross_entropy(model(validation[0]), validation[1]).item()] = model(test).softmax(-1)
    model = adapted(base)
    q = ngvi.network(model, num_data=len(labels), temperature=0.1)  # over what is not frozen
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    ngvi.attach(optimizer, q, steps=options.steps, curvature=ngvi.networks.SampledLabels(every=2))
    train(model, optimizer, few, labels, options.steps)
    model.eval()
    ngvi.calibrate(q, [validation])
    found = {"point estimate": points[min(points)], "posterior": q.predict(test, samples=32)}
    nll = {name: nn.functional.nll_loss(p.log(), answers).item() for name, p in found.items()}
    print(", ".join(f"{name}: test NLL {value:.3f}" for name, value in nll.items()))

    certainty = {name: m.abs() / q.variance[name].sqrt() for name, m in q.mean.items()}
    shares, pruned = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0), []
    for share in shares:  # the least certain factors become zero, in a copy
        other = copy.deepcopy(model).requires_grad_(False)
        least = torch.cat([c.flatten() for c in certainty.values()]).quantile(share)
        for name, c in certainty.items():
            other.get_parameter(name).masked_fill_(c < least, 0.0)
        pruned.append(nn.functional.cross_entropy(other(test), answers).item())
    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.add_subplot(xlabel="share of factors set to zero, the least certain first", ylabel="test NLL")
    axes.plot(shares, pruned, "o-")
    figure.savefig(options.out, dpi=120)
    return nll


if __name__ == "__main__":
    main()
