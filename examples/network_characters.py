"""A small transformer on characters: a posterior over all of its weights, and where in a text it is unsure.

    python examples/network_characters.py [--steps 1500] [--width 64] [--out network_characters.png]

The text is the source of Python's own textwrap.  The data of a model of sequences are the characters it predicts, so
that num_data counts them.
"""

import argparse
import textwrap
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import nn

import torchngvi as ngvi

CONTEXT = 32


class Transformer(nn.Module):
    """Two layers that see what is to the left."""

    def __init__(self, characters, width):
        super().__init__()
        self.characters, self.places = nn.Embedding(characters, width), nn.Embedding(CONTEXT, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, characters)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT), persistent=False)

    def forward(self, text):
        state = self.characters(text) + self.places.weight
        return self.head(self.layers(state, mask=self.mask, is_causal=True))


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--out", default="network_characters.png")
    options = parser.parse_args(arguments)

    text = Path(textwrap.__file__).read_text(encoding="utf-8")
    alphabet = sorted(set(text))
    text = torch.tensor([alphabet.index(character) for character in text])
    train, validation, test = text.split([len(text) - 4000, 1000, 3000])

    torch.manual_seed(0)
    model = Transformer(len(alphabet), options.width)
    q = ngvi.network(model, num_data=len(train))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    ngvi.attach(optimizer, q, steps=options.steps)
    for _ in range(options.steps):
        start = torch.randint(len(train) - CONTEXT, (32, 1))
        window = train[start + torch.arange(CONTEXT + 1)]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten()).backward()
        optimizer.step()

    def windows(part):
        pieces = part[: (len(part) - 1) // CONTEXT * CONTEXT + 1].unfold(0, CONTEXT + 1, CONTEXT)
        return pieces[:, :-1], pieces[:, 1:]

    model.eval()
    found = ngvi.calibrate(q, [windows(validation)], samples=8)
    inputs, labels = windows(test)
    nll = -q.log_prob(inputs, labels, samples=8).mean().item()
    with torch.no_grad():
        point = nn.functional.cross_entropy(model(inputs).flatten(0, 1), labels.flatten()).item()
    print(f"{q}: nats a character {nll:.3f}, at the mean weights {point:.3f}; temperature {found.temperature:g}")

    shown = q.predictive(inputs[:6], samples=8)
    figure = Figure(figsize=(10, 3), layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(shown.epistemic.numpy(), cmap="Oranges", aspect="auto")
    for place, label in enumerate(labels[:6].flatten()):
        character = alphabet[label].replace("\n", "⏎")
        axes.text(place % CONTEXT, place // CONTEXT, character, ha="center", va="center", family="monospace")
    axes.set_axis_off()
    figure.colorbar(image, label="epistemic uncertainty, nats")
    figure.savefig(options.out, dpi=120)
    return nll, point


if __name__ == "__main__":
    main()
