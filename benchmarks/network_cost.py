"""The cost of a training step of a network: AdamW, AdamW with a posterior attached, VON, ivon-opt where it installs.

    python benchmarks/network_cost.py [--widths 100 512 2048] [--batch 128] [--repeats 7] [--device cpu|cuda]

Whole steps (forward, backward, optimizer), interleaved in one process, on batches that are new within a repeat: ratios
of seconds (of the processor; of the wall on a GPU) to AdamW(foreach), their median and that of the least of both; run
it with OMP_NUM_THREADS=1.  Then what stays in memory from step to step beside a parameter and its gradient.
"""

import argparse
import statistics

import clocks
import torch
import torch.nn.functional as F
from torch import nn

import torchngvi
from torchngvi.networks.weights import posterior_of

try:
    import ivon
except ImportError:
    ivon = None

STEPS = 20  # of a repeat: two of them observe the curvature


def network(width, depth=3):
    torch.manual_seed(0)
    sizes = [width] * depth
    layers = [nn.Linear(784, width)]
    for a, b in zip(sizes[:-1], sizes[1:], strict=True):
        layers += [nn.ReLU(), nn.Linear(a, b)]
    return nn.Sequential(*layers, nn.ReLU(), nn.Linear(width, 10))


def adamw(width, **keywords):
    model = network(width)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0, **keywords)


def attached(width, **keywords):
    model, optimizer = adamw(width, **keywords)
    torchngvi.attach(optimizer, torchngvi.network(model, num_data=60_000), steps=10_000)
    return model, optimizer


def von(width):
    model = network(width)
    return model, torchngvi.VON(model, 60_000, steps=10_000)


def reference(width):
    model = network(width)
    return model, ivon.IVON(model.parameters(), lr=0.1, ess=60_000)


CASES = {
    "AdamW(foreach)": lambda w: adamw(w, foreach=True),
    "AdamW(fused)": lambda w: adamw(w, fused=True),
    "attach, AdamW(foreach)": lambda w: attached(w, foreach=True),
    "attach, AdamW(fused)": lambda w: attached(w, fused=True),
    "VON": von,
    **({"ivon-opt": reference} if ivon else {}),
}


def steps(model, optimizer, batches, published):
    """Seconds of some steps."""
    device = next(model.parameters()).device.type
    start = clocks.seconds(device)
    for x, y in batches:
        optimizer.zero_grad()
        if published:
            with optimizer.sampled_params(train=True):
                F.cross_entropy(model(x), y).backward()
        else:
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return clocks.seconds(device) - start


def held(model, optimizer):
    """Bytes a weight that stay from step to step beside the parameter and its gradient."""
    q = getattr(optimizer, "q", None) or posterior_of(model)
    found = [] if q is None else list(q.buffers())
    for kept in [*optimizer.state.values(), *optimizer.param_groups]:
        found += kept.values() if isinstance(kept, dict) else [kept]
    tensors = {id(value): value for value in found if isinstance(value, torch.Tensor) and value.numel() > 1}
    count = sum(p.numel() for p in model.parameters())
    return sum(value.numel() * value.element_size() for value in tensors.values()) / count


def compare(width, batch, repeats):
    batches = [(torch.randn(batch, 784), torch.randint(10, (batch,))) for _ in range(STEPS)]
    cases = {name: make(width) for name, make in CASES.items()}
    times = {name: [] for name in cases}
    for _ in range(repeats + 1):
        for name, (model, optimizer) in cases.items():
            times[name].append(steps(model, optimizer, batches, name == "ivon-opt"))
    base = times["AdamW(foreach)"][1:]
    count = sum(p.numel() for p in cases["VON"][0].parameters())
    print(
        f"\n{count:,} weights, batch {batch}: {statistics.median(base) / STEPS * 1e3:.2f} ms a step of AdamW(foreach)"
    )
    print(f"{'':27s} median  of the least  bytes a weight")
    for name, found in times.items():
        ratio = statistics.median(a / b for a, b in zip(found[1:], base, strict=True))
        print(f"{name:27s} {ratio:6.2f} {min(found[1:]) / min(base):13.2f} {held(*cases[name]):15.1f}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", default=[100, 512])
    parser.add_argument("--batch", type=int, nargs="+", default=[128])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options = parser.parse_args()
    torch.set_default_device(options.device)
    print(f"PyTorch {torch.__version__}, {clocks.named(options.device)}")
    for width in options.widths:
        for batch in options.batch:
            compare(width, batch, options.repeats)


if __name__ == "__main__":
    main()
