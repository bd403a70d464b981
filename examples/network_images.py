"""A convolutional network on images: calibrated probabilities, and a score for images that are none of the kind.

    python examples/network_images.py [--steps 600] [--out network_images.png]

Handwritten digits.  The network is trained at the temperature 0.1, as independent weights at 1 are too
wide where data are few, and the last word on it have 300 images that are not trained on; what the network
has not seen are the test images in a mirror.  The curvature is observed at every second step, as the run is short.
"""

import argparse

import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score
from torch import nn

import torchngvi as ngvi


def images():
    """Images (n, 1, 8, 8) with their labels, in three parts."""
    digits = load_digits()
    X, y = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, torch.tensor(digits.target)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    return [(X[rows], y[rows]) for rows in order.split([1000, 300, 497])]


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--out", default="network_images.png")
    options = parser.parse_args(arguments)

    (X, y), validation, (inputs, labels) = images()
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()),
        *(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 10)),
    )
    q = ngvi.network(model, num_data=len(y), temperature=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    ngvi.attach(optimizer, q, steps=options.steps, curvature=ngvi.networks.SampledLabels(every=2))
    for _ in range(options.steps):
        rows = torch.randint(len(y), (50,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(X[rows]), y[rows]).backward()
        optimizer.step()

    model.eval()
    print(f"temperature {ngvi.calibrate(q, [validation]).temperature:g}")
    nll = -q.log_prob(inputs, labels, samples=32).mean().item()
    point = nn.functional.cross_entropy(model(inputs), labels).item()
    found, mirrored = q.predictive(inputs, samples=32), q.predictive(inputs.flip(3), samples=32)
    probability, label = found.mean.max(-1)
    right = (label == labels).float()
    scores = torch.cat([found.epistemic, mirrored.epistemic])
    area = roc_auc_score(torch.arange(len(scores)) >= len(inputs), scores)
    print(f"test NLL {nll:.4f} (at the mean weights {point:.4f}), accuracy {right.mean():.3f}")
    print(f"mirrored images are told by the epistemic uncertainty with an area under the curve of {area:.3f}")

    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right_axes = figure.subplots(1, 2)
    edges = torch.linspace(0, 1, 11)
    for low, high in zip(edges[:-1], edges[1:], strict=True):
        rows = (probability > low) & (probability <= high)
        if rows.any():
            left.plot(probability[rows].mean(), right[rows].mean(), "o", markersize=2 + rows.sum() ** 0.5, color="C0")
    left.plot([0, 1], [0, 1], color="0.7", zorder=0)
    left.set_xlabel("probability of the predicted class")
    left.set_ylabel("share of right predictions; area: images")
    for part, name in ((found, "test images"), (mirrored, "in a mirror")):
        right_axes.hist(part.epistemic.clamp_min(1e-6).log10(), bins=30, alpha=0.6, label=name)
    right_axes.set_xlabel("log10 of the epistemic uncertainty in nats")
    right_axes.legend()
    figure.savefig(options.out, dpi=120)
    return nll, point, area


if __name__ == "__main__":
    main()
