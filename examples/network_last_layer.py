"""Fine-tuning a last layer: a frozen backbone, a posterior over the head alone, and the exact one.

    python examples/network_last_layer.py [--steps 600] [--out network_last_layer.png]

A network learns the digits 0 to 4 from many images; its features are then used for 5 to 9, of which there are 60.  A
posterior over the head is attached to the optimizer by the pattern of its names.  The same head is a softmax
regression on the features, so that the best Gaussian with a full covariance can be had without any optimizer's noise.
"""

import argparse

import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import nn

import torchngvi as ngvi


class Network(nn.Module):
    """Features, and a head for five classes."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(64, 16), nn.ReLU())
        self.head = nn.Linear(16, 5)

    def forward(self, x):
        return self.head(self.backbone(x))


def train(model, optimizer, X, y, steps):
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        rows = torch.randint(len(y), (30,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(X[rows]), y[rows]).backward()
        optimizer.step()
        schedule.step()


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--out", default="network_last_layer.png")
    options = parser.parse_args(arguments)

    X, y = load_digits(return_X_y=True)
    X, y = torch.tensor(X, dtype=torch.float32) / 16, torch.tensor(y)
    torch.manual_seed(0)
    model = Network()
    first = y < 5
    train(model, torch.optim.AdamW(model.parameters(), lr=3e-3), X[first], y[first], 200)

    X, y = X[~first], y[~first] - 5
    (few, labels), (test, answers) = (X[:60], y[:60]), (X[60:], y[60:])
    model.backbone.requires_grad_(False)
    model.head.reset_parameters()
    q = ngvi.network(model, num_data=60, structure={"head.*": "diagonal"})
    optimizer = torch.optim.AdamW(model.head.parameters(), lr=1e-3, weight_decay=0.0)
    attachment = ngvi.attach(optimizer, q, steps=options.steps, curvature=ngvi.networks.SampledLabels(every=1))
    train(model, optimizer, few, labels, options.steps)
    model.eval()
    attached = q.predict(test, samples=64)

    with torch.no_grad():  # the exact one: softmax regression on the features, with a column for the bias
        features, new = (nn.functional.pad(model.backbone(part).double(), (0, 1), value=1.0) for part in (few, test))
    regression = ngvi.models.SoftmaxRegression(features, labels, num_nodes=128)
    full = ngvi.CholeskyGaussian(regression.dim, dtype=torch.float64)
    ngvi.fit(full, regression, progress=False)
    exact = regression.probabilities(full, new)

    attachment.remove()
    q.release()
    model.head.reset_parameters()
    train(model, torch.optim.AdamW(model.head.parameters(), lr=3e-2), few, labels, options.steps)
    with torch.no_grad():
        point = model.eval()(test).softmax(-1)

    found = {"point estimate": point, "posterior, attached": attached, "posterior, exact": exact}
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    nll = {}
    for axes, (name, p) in zip(figure.subplots(1, 3, sharey=True), found.items(), strict=True):
        nll[name] = -p[torch.arange(len(answers)), answers].log().mean().item()
        probability, label = p.max(-1)
        print(f"{name:20s} test NLL {nll[name]:.3f}, accuracy {(label == answers).float().mean():.3f}")
        for right, color in ((True, "C0"), (False, "C3")):
            rows = (label == answers) == right
            label_of = "right" if right else "wrong"
            axes.hist(probability[rows], bins=20, range=(0, 1), color=color, alpha=0.7, label=label_of)
        axes.set_title(f"{name}: NLL {nll[name]:.2f}")
        axes.set_xlabel("probability of the predicted class")
    axes.legend()
    figure.savefig(options.out, dpi=120)
    return nll


if __name__ == "__main__":
    main()
