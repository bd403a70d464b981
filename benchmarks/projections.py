"""Seconds of the projections of black-box VI: diagonal of a triangular root, spectrum of a symmetric root.

python benchmarks/projections.py
"""

import time

import torch

from torchngvi.structures import Dense


def seconds(call, least=0.3):
    """Of one call, the best of three."""
    best = float("inf")
    for _ in range(3):
        count, begin = 0, time.perf_counter()
        while time.perf_counter() - begin < least / 3:
            call()
            count += 1
        best = min(best, (time.perf_counter() - begin) / count)
    return best


def main():
    torch.set_num_threads(1)
    print(f"{'d':>5} {'diagonal, in place':>19} {'diagonal, of a copy':>20} {'symmetric root':>15}")
    for dim in (64, 128, 256, 512, 1024):
        C = torch.randn(dim, dim, dtype=torch.float64).tril()
        symmetric, diagonal = C @ C.mT, C.diagonal()

        def clipped(symmetric=symmetric):
            values, vectors = torch.linalg.eigh(symmetric)
            return (vectors * values.clamp_min(0.5)) @ vectors.mT

        times = [
            seconds(lambda diagonal=diagonal: diagonal.clamp_(min=0.5)),
            seconds(lambda C=C, diagonal=diagonal: Dense(len(C)).with_diagonal(C, diagonal.clamp_min(0.5))),
            seconds(clipped),
        ]
        print(f"{dim:5d} {times[0]:19.2e} {times[1]:20.2e} {times[2]:15.2e}")
    print("mean field, where a call no longer costs more than its numbers:")
    for dim in (10_000, 100_000, 1_000_000, 10_000_000):
        scale = torch.randn(dim, dtype=torch.float64)
        print(f"{dim:9d} {seconds(lambda scale=scale: scale.clamp_(min=0.5)):15.2e}")


if __name__ == "__main__":
    main()
