"""The losses of a few dozen fits in this tree and in another checkout: the largest relative difference, and where.

    python -m benchmarks.same_results --before CHECKOUT [--only softmax]

Regressions of every likelihood under four kinds of posterior, weighted and with an offset, batches, softmax, mixed
models, sparse rows and factors over a forest, each fitted to a natural-gradient norm of 1e-6 in a process of its tree.
What is faster must have the same optimum: the goal is 1e-9 of the loss.  The exit status is 1 where it is missed, or
where a fit converges in one tree only.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

GOAL = 1e-9
FAMILIES = ("bernoulli_logit", "bernoulli_probit", "poisson_log", "gaussian", "negative_binomial", "student_t")
TREE = Path(__file__).resolve().parents[1]

Problem = tuple[Any, Any]  # q and the model


def problems() -> Iterator[tuple[str, Callable[[], Problem]]]:
    """Every case by name.  This runs in both trees, so that it keeps to what both have."""
    import torch

    import torchngvi as ngvi
    from torchngvi import models
    from torchngvi.numerics.sparse import compressed
    from torchngvi.structures import arrow

    torch.set_default_dtype(torch.float64)
    posteriors = (ngvi.CholeskyGaussian, ngvi.DiagonalGaussian, ngvi.NaturalGaussian, ngvi.PrecisionCholeskyGaussian)
    special = {"negative_binomial": models.NegativeBinomial(2.0), "student_t": models.StudentT(1.0, 4.0)}

    def data(family: str, rows: int, dim: int, seed: int, batch: tuple[int, ...] = ()) -> tuple[Any, Any]:
        generator = torch.Generator().manual_seed(seed)
        X = torch.randn(rows, dim, generator=generator)
        X[:, 0] = 1.0
        eta = 0.5 * X[:, : 1 + dim // 2].sum(-1) + 0.3 * torch.randn(*batch, rows, generator=generator)
        if family.startswith("bernoulli"):
            return X, torch.bernoulli(eta.sigmoid(), generator=generator)
        if family in ("poisson_log", "negative_binomial"):
            return X, torch.poisson(eta.exp(), generator)
        return X, eta

    def regression(kind: Any, family: str, batch: tuple[int, ...] = (), **options: Any) -> Problem:
        X, y = data(family, 80, 6, 1, batch)
        model = ngvi.GeneralizedLinear(X, y, special.get(family, family), **options)
        return kind(6, batch, dtype=torch.float64), model

    def softmax(kind: Any) -> Problem:
        X, eta = data("gaussian", 60, 4, 2)
        model = models.SoftmaxRegression(X, torch.bucketize(eta, torch.tensor([-0.3, 0.8])))
        return kind(model.dim, dtype=torch.float64), model

    def groups(family: str, local: int) -> tuple[Any, Any, Any]:
        X, y = data(family, 120, 3, 3)
        return X, y, (X[:, :local], torch.arange(120) // 6)

    def mixed(family: str, local: int) -> Problem:
        prior = ngvi.models.MixedPrior(10.0, "kass-natarajan")
        model = ngvi.models.MixedLogJoint(*groups(family, local), family, prior=prior)
        return model.posterior(), model

    def forest(family: str, in_factors: bool) -> Problem:
        X, y, _ = groups(family, 1)
        structure, rows = arrow(groups=20, local=1, globals=2), torch.arange(120)
        q = ngvi.PrecisionCholeskyGaussian(22, structure=structure, dtype=torch.float64)
        if in_factors:
            model = ngvi.GeneralizedLinear(X.unflatten(0, (20, 6)), y.unflatten(0, (20, 6)), family)
            return q, models.TractableFactors(structure, [(0, model)])
        columns = torch.stack([rows // 6, torch.full_like(rows, 20), torch.full_like(rows, 21)], -1)
        return q, ngvi.GeneralizedLinear(
            compressed(3 * torch.arange(121), columns.flatten(), X.flatten(), (120, 22)), y, family
        )

    yield from (
        (f"{family}, {kind.__name__}", lambda family=family, kind=kind: regression(kind, family))
        for family in FAMILIES
        for kind in posteriors
    )
    full = ngvi.CholeskyGaussian
    for family in FAMILIES:
        yield f"{family}, batch of 5", lambda family=family: regression(full, family, (5,))
    weights, offset = torch.linspace(0.1, 2.0, 80), torch.linspace(-0.5, 0.5, 80)
    yield "weights and offset", lambda: regression(full, "bernoulli_logit", weights=weights, offset=offset)
    yield "half a temperature", lambda: regression(full, "poisson_log", temperature=0.5)
    yield from ((f"softmax, {kind.__name__}", lambda kind=kind: softmax(kind)) for kind in posteriors)
    for family in ("bernoulli_logit", "poisson_log", "gaussian"):
        for local in (1, 2):
            yield f"mixed, {family}, {local} effects", lambda f=family, r=local: mixed(f, r)
        yield f"sparse rows, {family}", lambda family=family: forest(family, False)
        yield f"factors, {family}", lambda family=family: forest(family, True)


def losses(only: str) -> dict[str, tuple[list[float], bool]]:
    """The losses of all members in this process, and whether the fit has converged, by the name of the case."""
    import torch

    import torchngvi
    from torchngvi import VN, fit

    if not Path(torchngvi.__file__).resolve().is_relative_to(Path.cwd()):
        raise SystemExit(f"torchngvi is that of {Path(torchngvi.__file__).parent}, not that of {Path.cwd()}")
    torch.set_num_threads(1)
    found = {}
    for name, made in problems():
        if only not in name:
            continue
        q, model = made()
        result = fit(q, model, tolerance=1e-6, progress=False)
        found[name] = VN(q).evaluate(model).loss.reshape(-1).tolist(), result.converged
    return found


def in_tree(tree: Path, only: str) -> dict[str, tuple[list[float], bool]]:
    """The same in a process of a tree of its own."""
    here = {**os.environ, "PYTHONPATH": str(tree)}
    done = subprocess.run(
        [sys.executable, __file__, "--losses", "--only", only], env=here, cwd=tree, stdout=subprocess.PIPE, check=True
    )
    return json.loads(done.stdout)


def difference(now: list[float], before: list[float]) -> float:
    """The largest relative difference of two lists of losses; infinite of others than numbers."""
    if len(now) != len(before):
        return float("inf")
    each = [abs(x - y) / max(abs(y), 1.0) for x, y in zip(now, before, strict=True)]
    return max(x if x == x else float("inf") for x in each)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="another checkout, which is only read")
    parser.add_argument("--only", default="", help="cases whose names contain this")
    parser.add_argument("--losses", action="store_true", help="print those of this process alone, as JSON")
    given = parser.parse_args()
    if given.losses:
        print(json.dumps(losses(given.only)))
        return 0
    if given.before is None:
        parser.error("name the other checkout by --before")
    now, before = in_tree(TREE, given.only), in_tree(given.before.resolve(), given.only)
    apart = {name: difference(now[name][0], before[name][0]) for name in now}
    uneven = [name for name in now if now[name][1] != before[name][1]]
    for name, gap in sorted(apart.items(), key=lambda item: -item[1])[:5]:
        print(f"{gap:.1e}  {name}")
    worst = max(apart, key=apart.__getitem__)
    print(
        f"{len(apart)} fits, {sum(converged for _, converged in now.values())} converged; the losses differ by ", end=""
    )
    print(f"{apart[worst]:.1e} of themselves at most: {worst}")
    for name in uneven:
        print(f"converged is {before[name][1]} before and {now[name][1]} now: {name}")
    return int(apart[worst] > GOAL or bool(uneven))


if __name__ == "__main__":
    sys.exit(main())
