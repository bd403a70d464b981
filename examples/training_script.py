"""Natural gradients dropped into a training loop: a posterior over a network's weights by mini-batches, and Adam.

    python examples/training_script.py [--epochs 60] [--out training_script.png]

A small network whose last layer is Bayesian: its weights come from q by ``rsample``, ``loss.backward()``
fills q's probes and the features' gradients in the same pass, VN moves q and Adam moves the features.  The picture has
the probability of a class, and how much draws of the last layer disagree on it.
"""

import argparse

import torch
from matplotlib.figure import Figure
from sklearn.datasets import make_moons
from torch.nn.functional import binary_cross_entropy_with_logits

import torchngvi as ngvi


@torch.no_grad()
def draw(q, features, inputs, labels, out):
    across, up = torch.linspace(-2.2, 3.2, 90), torch.linspace(-1.8, 2.3, 70)
    x, y = torch.meshgrid(across, up, indexing="xy")
    probability = torch.sigmoid(q.sample((200,)) @ features(torch.stack([x, y], -1).reshape(-1, 2)).mT)
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    parts = (
        ("p(y = 1), mean over draws", probability.mean(0), "RdBu_r", torch.linspace(0, 1, 11)),
        ("standard deviation over draws", probability.std(0), "viridis", 10),
    )
    for axes, (name, value, colours, levels) in zip(figure.subplots(1, 2, sharey=True), parts, strict=True):
        shown = axes.contourf(across, up, value.reshape(x.shape), levels=levels, cmap=colours)
        axes.scatter(inputs[:, 0], inputs[:, 1], c=labels, s=4, cmap="RdBu_r", edgecolors="k", linewidths=0.2)
        axes.set_title(name)
        figure.colorbar(shown)
    figure.savefig(out, dpi=120)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--out", default="training_script.png")
    options = parser.parse_args(arguments)
    epochs = options.epochs

    torch.manual_seed(0)
    inputs, labels = (torch.tensor(part, dtype=torch.float32) for part in make_moons(1000, noise=0.25, random_state=0))
    train = torch.utils.data.TensorDataset(inputs[:800], labels[:800])
    loader = torch.utils.data.DataLoader(train, batch_size=100, shuffle=True)

    features = torch.nn.Sequential(torch.nn.Linear(2, 20), torch.nn.Tanh(), torch.nn.Linear(20, 10), torch.nn.Tanh())
    q, prior = ngvi.CholeskyGaussian(10, scale=0.3), ngvi.CholeskyGaussian(10)
    natural = ngvi.VN(q, lr=0.1, step_size=ngvi.KLRadius(0.1), loss_scale=len(train))
    adam = torch.optim.Adam(features.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(natural, T_max=epochs)

    for _ in range(epochs):
        for x, y in loader:
            natural.zero_grad()
            adam.zero_grad()
            logits = q.rsample((32,)) @ features(x).mT  # (32, 100)
            nll = binary_cross_entropy_with_logits(logits, y.expand_as(logits))
            loss = nll + q.kl(prior) / len(train)  # the negative ELBO per observation
            loss.backward()
            natural.step()
            adam.step()
        schedule.step()

    with torch.no_grad():
        probability = torch.sigmoid(q.sample((200,)) @ features(inputs[800:]).mT).mean(0)
    accuracy = ((probability > 0.5) == labels[800:].bool()).float().mean().item()
    print(f"loss {loss.item():.4f}, held-out accuracy {accuracy:.3f}, steps not taken {natural.rejections}")
    draw(q, features, inputs, labels, options.out)
    return accuracy


if __name__ == "__main__":
    main()
