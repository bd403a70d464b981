"""Ten thousand mixed models of one design in one call: python benchmarks/many_models.py [members] [draws] [peers].

Counts of 200 rows, 20 donors with 10 rows each, half of each in a condition: counts ~ condition + (1 | donor), negative
binomial, every member with its own truth: intercept N(1, .7²), slope N(0, .3²), log sd N(log .6, .3²), log size
N(log 3, .4²).  It prints the processor's time of a model, the peak of memory, how many are not converged or have a
k-hat above .7, and how often 95 % intervals of the first thousand hold the truth.  With a number of peers, as many
members are fitted by statsmodels in a loop: its negative binomial regression, which has no effects of donors and no
prior, and its PoissonBayesMixedGLM by variational Bayes, which has effects and no size; no model there has both.
One thread.
"""

import math
import resource
import sys
import time
import warnings

import torch

from torchngvi.tables.design import design_of_arrays
from torchngvi.tables.many import ManySettings, fit_many

DONORS, EACH, COVERED = 20, 10, 1000


def data(members, seed=0):
    """The design, outcomes (members, 200), and truths (members, 4)."""
    generator = torch.Generator().manual_seed(seed)
    donor = torch.arange(DONORS).repeat_interleave(EACH)
    x = (torch.arange(DONORS * EACH) % 2).double()
    X = torch.stack([torch.ones_like(x), x], -1)
    middle, spread = torch.tensor([[1.0, 0.0, math.log(0.6), math.log(3.0)], [0.7, 0.3, 0.3, 0.4]], dtype=torch.float64)
    truth = middle + spread * torch.randn(members, 4, generator=generator, dtype=torch.float64)
    b = truth[:, 2:3].exp() * torch.randn(members, DONORS, generator=generator, dtype=torch.float64)
    eta = truth[:, :1] + truth[:, 1:2] * x + b[:, donor]
    size = truth[:, 3:].exp().expand_as(eta)
    Y = torch.poisson(eta.exp() * torch._standard_gamma(size, generator) / size, generator)
    return design_of_arrays(X, Y[0], (X[:, :1], donor), names=["Intercept", "condition"]), Y, truth


def megabytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def ours(members, draws):
    design, Y, truth = data(members)
    fit_many(design, Y[:8], progress=False)  # what is loaded at the first use
    before, begun = megabytes(), time.process_time()
    result = fit_many(design, Y, progress=False, settings=ManySettings(draws=draws))
    parts = result.coefficients, result.sd, result.parameters
    seconds = time.process_time() - begun
    print(result)
    print(f"{1e3 * seconds / members:.1f} ms a model of the processor, {seconds:.0f} s in all, for {draws} draws each")
    print(f"peak {megabytes():.0f} MB, {megabytes() - before:.0f} MB more than before: "
          f"{(megabytes() - before) / members:.3f} MB a model")  # fmt: skip
    print(f"not converged: {int((~result.converged).sum())}; named: {len(result.doubtful)}")
    nodes, count = result.nodes.unique(return_counts=True)
    print(f"nodes: {dict(zip(nodes.tolist(), count.tolist(), strict=True))}")
    shares = torch.tensor([0.0, 0.05, 0.5], dtype=torch.float64)
    print(f"effective draws, least, 5 %, median: {[round(x) for x in result.effective.quantile(shares).tolist()]}")
    low, high = (torch.cat([getattr(part, end) for part in parts], -1)[:COVERED] for end in ("low", "high"))
    true = torch.cat([truth[:, :2], truth[:, 2:].exp()], -1)[:COVERED]
    held = ((low <= true) & (true <= high)).double().mean(0).tolist()
    names = [name for part in parts for name in part.names]
    print("95 % intervals hold the truth: " + ", ".join(f"{n} {h:.3f}" for n, h in zip(names, held, strict=True)))


def peers(members):
    import numpy as np
    import statsmodels.api as sm
    from statsmodels.genmod.bayes_mixed_glm import PoissonBayesMixedGLM

    design, Y, _ = data(members)
    X, groups = design.X.numpy(), design.factors[0].groups.numpy()
    Z = np.eye(DONORS)[groups]
    warnings.simplefilter("ignore")
    fits = {
        "NegativeBinomial (no effects of donors)": lambda y: sm.NegativeBinomial(y, X).fit(disp=0),
        "PoissonBayesMixedGLM, fit_vb (no size)": lambda y: PoissonBayesMixedGLM(
            y, X, Z, np.zeros(DONORS, dtype=int)
        ).fit_vb(),
    }
    for name, one in fits.items():
        begun = time.process_time()
        for y in Y.numpy():
            one(y)
        print(
            f"statsmodels {name}: {1e3 * (time.process_time() - begun) / members:.1f} ms a model, {members} in a loop"
        )


def main():
    torch.set_num_threads(1)
    members, draws, beside = (int(x) for x in [*sys.argv[1:], *("10000", "100", "0")[len(sys.argv) - 1 :]])
    ours(members, draws)
    if beside:
        peers(beside)


if __name__ == "__main__":
    main()
