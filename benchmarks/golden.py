"""The seven ways into the library, each as one small problem, with a few more fits and steps of every method.

    python benchmarks/golden.py [--only NAME]
    python benchmarks/golden.py | diff - tests/house/golden_numbers.json

The first prints the numbers of each case as JSON: losses, counts, means and standard deviations to the last bit, in
float64 on one thread with fixed seeds.  The second compares them bit for bit with those that are recorded, on the
kind of processor that recorded them; `tests/house/test_golden_numbers.py` compares them up to rounding on any.
`benchmarks/house.py --paths` traces what the seven run.  What is imported here is public, so that this file can run on
an older checkout too.
"""

import argparse
import contextlib
import io
import json
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

Numbers = dict[str, Any]  # floats, whole numbers, words, and lists of floats
Found = Callable[[], Numbers]  # reads the numbers of what has run
Ready = Callable[[], Found]  # runs, once the data and the model are made
DTYPE = torch.float64


def to_floats(values: Any) -> list[float]:
    """The entries of a tensor, an array or a number, as floats."""
    return torch.as_tensor(values, dtype=DTYPE).detach().reshape(-1).tolist()


def draw_noise(*shape: int, seed: int = 0) -> torch.Tensor:
    """Standard normal numbers in double precision."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=DTYPE)


def read_fit(result: Any, q: Any = None) -> Numbers:
    """What a fit has found: loss, counts, means and standard deviations."""
    q = result.posterior if q is None else q
    return {
        "loss": to_floats(result.loss),
        "evaluations": result.evaluations,
        "gradients": result.gradients,
        "values": result.values,
        "converged": bool(result.converged),
        "mean": to_floats(q.mean),
        "sd": to_floats(q.stddev),
    }


def read_verdict(verdict: Any) -> Numbers:
    """What an examination has found."""
    shape, sampled, effort = verdict.shape, verdict.sampled, verdict.effort
    return {
        "verdict": verdict.word,
        "verdict table": str(verdict).splitlines(),
        "linear response": to_floats(shape.log_sd),
        "tails": to_floats(shape.tails),
        "eigenvalue": to_floats(shape.eigenvalue),
        "sampled sd": to_floats(sampled.corrected.sd),
        "k-hat": [*to_floats(sampled.from_q.k_hat), *to_floats(sampled.corrected.k_hat)],
        "effort": [effort.gradients, effort.values, effort.starts],
    }


def make_logistic_rows() -> tuple[torch.Tensor, torch.Tensor]:
    """Forty rows of three covariates, and whether a noisy sum of them is positive."""
    X = draw_noise(40, 3)
    return X, (X.sum(-1) + draw_noise(40, seed=1) > 0).double()


def prepare_generalized_linear() -> Ready:
    import torchngvi as ngvi

    X, y = make_logistic_rows()

    def run() -> Found:
        q = ngvi.CholeskyGaussian(3, dtype=DTYPE)
        result = ngvi.fit(q, ngvi.GeneralizedLinear(X, y), tolerance=1e-6, progress=False)
        return lambda: read_fit(result)

    return run


def curved_log_joint(theta: torch.Tensor) -> torch.Tensor:
    """A density with a bend and a scale, which a Gaussian only just fits."""
    x, y, z = theta.unbind(-1)
    return -0.5 * x.square() - 0.5 * (y - 0.3 * x.square()).square() - z.exp() + 2 * z


def prepare_log_joint() -> Ready:
    import torchngvi as ngvi

    def run() -> Found:
        q = ngvi.CholeskyGaussian(3, dtype=DTYPE)
        result = ngvi.fit(q, curved_log_joint, progress=False)
        return lambda: read_fit(result) | read_verdict(result.verdict)

    return run


def prepare_mixed() -> Ready:
    import pandas as pd

    import torchngvi as ngvi

    week, patient = torch.arange(5, dtype=DTYPE).repeat(20), torch.arange(20).repeat_interleave(5)
    rate = torch.exp(1.0 - 0.2 * week + 0.5 * draw_noise(20)[patient])
    counts = torch.poisson(rate, torch.Generator().manual_seed(1)).int()
    table = pd.DataFrame({"seizures": counts.numpy(), "week": week.numpy(), "patient": patient.numpy()})

    def run() -> Found:
        result = ngvi.mixed("seizures ~ week + (1 | patient)", table, "poisson").fit(progress=False)
        shown = result.summary()
        return lambda: {
            "converged": result.converged,
            "gradients": result.fitted.gradients,
            "k-hat": to_floats(result.k_hat),
            "log evidence": to_floats(result.log_evidence),
            "coefficients": to_floats(shown.fixed.mean),
            "their sds": to_floats(shown.fixed.sd),
            "between patients": to_floats(shown.sd.mean),
            "low": to_floats(shown.fixed.low),
        }

    return run


def prepare_svgp() -> Ready:
    import gpytorch as gp

    from torchngvi.adapters.gpytorch import train_svgp

    class Model(gp.models.ApproximateGP):
        def __init__(self, Z):
            q = gp.variational.CholeskyVariationalDistribution(len(Z))
            super().__init__(gp.variational.VariationalStrategy(self, Z, q))
            self.mean_module, self.covar_module = gp.means.ZeroMean(), gp.kernels.RBFKernel()

        def forward(self, x):
            return gp.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    x = torch.linspace(-2, 2, 100, dtype=DTYPE)[:, None]
    y = torch.sin(3 * x[:, 0]) + 0.2 * draw_noise(100)

    def run() -> Found:
        model, likelihood = Model(x[::10].clone()).double(), gp.likelihoods.GaussianLikelihood().double()
        result = train_svgp(model, likelihood, (x, y), rounds=3, progress=False)
        named = sorted((*model.named_parameters(), *likelihood.named_parameters()))
        learned = sum((to_floats(parameter) for _, parameter in named), [])
        return lambda: read_fit(result) | {"losses": result.losses, "parameters": learned}

    return run


def prepare_guide() -> Ready:
    import pyro
    import pyro.distributions as dist

    from torchngvi.adapters.pyro import AutoGaussian, fit_guide

    dose, deaths = (
        torch.tensor([-0.86, -0.30, -0.05, 0.73], dtype=DTYPE),
        torch.tensor([0.0, 1.0, 3.0, 5.0], dtype=DTYPE),
    )

    def model(dose, deaths=None):
        a = pyro.sample("a", dist.Normal(torch.zeros((), dtype=DTYPE), 3.0))
        b = pyro.sample("b", dist.Normal(torch.zeros((), dtype=DTYPE), 5.0))
        with pyro.plate("groups", len(dose)):
            pyro.sample("deaths", dist.Binomial(5, logits=a + b * dose), obs=deaths)

    def run() -> Found:
        pyro.clear_param_store()
        made = AutoGaussian(model)
        result = fit_guide(model, made, dose, deaths, options={"progress": False})
        return lambda: read_fit(result, made.posterior)

    return run


def prepare_attach() -> Ready:
    import torchngvi as ngvi

    net = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)).double()
    start = {name: value.clone() for name, value in net.state_dict().items()}
    X, y = make_logistic_rows()

    def run() -> Found:
        net.load_state_dict(start)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1.0, weight_decay=0.0)
        q = ngvi.network(net, num_data=len(X))
        ngvi.attach(optimizer, q, steps=40)
        losses = []
        for _ in range(40):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(net(X), y.long())
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return lambda: {
            "loss": losses[-5:],
            "draws": q.draw,
            "observed": q.observed,
            "mean": sum((to_floats(weight) for weight in net.parameters()), []),
            "probabilities": to_floats(q.predict(X[:3])),
        }

    return run


def prepare_command_line() -> Ready:
    from torchngvi.cli import main

    def run() -> Found:
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()) as said:
            words = ["fit", "--data", "breast_cancer", "--prior-precision", "0.1", "--no-progress", "--out"]
            status = main([*words, folder + "/run"])
            summary = json.loads(Path(folder, "run", "summary.json").read_text())
            header, *rows = Path(folder, "run", "coefficients.csv").read_text().splitlines()
        left_out = ("seconds", "natural_gradient_norm")  # of the machine, and rounding alone
        numbers = {name: x for name, x in summary.items() if isinstance(x, int | float) and name not in left_out}
        table = [float(entry) for row in rows for entry in row.split(",")[2:] if entry]
        found = {"status": status, "printed lines": len(said.getvalue().splitlines()), "columns": header}
        return lambda: found | numbers | {"table": table}

    return run


SEVEN: dict[str, Callable[[], Ready]] = {
    "fit(q, GeneralizedLinear)": prepare_generalized_linear,
    "fit(q, log_joint)": prepare_log_joint,
    "mixed(formula, table)": prepare_mixed,
    "train_svgp": prepare_svgp,
    "fit_guide": prepare_guide,
    "attach": prepare_attach,
    "torchngvi fit --data": prepare_command_line,
}

# the packages that some of them need
NEEDED = {
    "mixed(formula, table)": ("formulae", "pandas"),
    "train_svgp": ("gpytorch",),
    "fit_guide": ("pyro",),
    "torchngvi fit --data": ("sklearn", "pandas", "matplotlib", "rich"),
}


def find_method_steps() -> Iterator[tuple[str, Callable[[], Ready]]]:
    """Six steps of each method from one start."""
    import torchngvi as ngvi
    from torchngvi import methods
    from torchngvi.ifvb import MeanFieldGaussian

    X, y = make_logistic_rows()
    model = ngvi.GeneralizedLinear(X, y, prior_precision=0.5)
    full = lambda **options: ngvi.CholeskyGaussian(3, dtype=DTYPE, **options)  # noqa: E731
    options: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
        "VN": (full, {}),
        "SRVN": (full, {}),
        "SymmetricSRVN": (full, {"lr": 0.1}),
        "NewtonCG": (full, {}),
        "IBLR": (lambda: ngvi.NaturalGaussian(3, dtype=DTYPE), {"lr": 0.1}),
        "NGVI": (lambda: ngvi.NaturalGaussian(3, dtype=DTYPE), {"lr": 0.1}),
        "BWGD": (full, {"lr": 0.02}),
        "SVGDDensity": (full, {"lr": 0.02}),
        "CovarianceGD": (full, {"lr": 0.02}),
        "RootGD": (full, {"lr": 0.02}),
        "Snngm": (full, {"lr": 0.05}),
        "ProximalBBVI": (full, {"lr": 0.02}),
        "BBVI": (full, {"lr": 0.02, "smoothness": 12.0}),
        "IFVB": (lambda: MeanFieldGaussian(torch.zeros(6, dtype=DTYPE)), {"lr": 0.1}),
        "AIFVB": (lambda: MeanFieldGaussian(torch.zeros(6, dtype=DTYPE)), {"lr": 0.1}),
    }

    def prepare_steps(name: str) -> Ready:
        def run() -> Found:
            make, chosen = options[name]
            q = make()
            optimizer = getattr(methods, name)(q, **chosen)
            losses = [optimizer.step(model) for _ in range(6)]
            return lambda: {
                "loss": to_floats(torch.stack([torch.as_tensor(loss) for loss in losses])),
                "coordinates": sum((to_floats(part) for part in q.coordinates), []),
            }

        return run

    def prepare_von() -> Ready:
        def run() -> Found:
            net = torch.nn.Linear(3, 2).double()
            optimizer = ngvi.VON(net, len(X), steps=20)
            losses = []
            for _ in range(6):
                optimizer.zero_grad()
                loss = torch.nn.functional.cross_entropy(net(X), y.long())
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            return lambda: {"loss": losses, "weights": sum((to_floats(weight) for weight in net.parameters()), [])}

        return run

    yield from ((f"steps of {name}", lambda name=name: prepare_steps(name)) for name in options)
    yield "steps of VON", prepare_von


# fits of `same_results`: one of each kind of posterior, batch, likelihood and model
SAME = (
    "bernoulli_probit, CholeskyGaussian",
    "poisson_log, DiagonalGaussian",
    "negative_binomial, NaturalGaussian",
    "student_t, PrecisionCholeskyGaussian",
    "bernoulli_logit, batch of 5",
    "weights and offset",
    "softmax, CholeskyGaussian",
    "mixed, bernoulli_logit, 2 effects",
    "sparse rows, poisson_log",
    "factors, bernoulli_logit",
)


def find_regressions() -> Iterator[tuple[str, Callable[[], Ready]]]:
    """A few of the fits of `benchmarks/same_results.py`."""
    from torchngvi import fit

    sys.path.insert(0, str(Path(__file__).parent))
    try:
        import same_results
    finally:
        sys.path.pop(0)

    def prepare_regression(made: Callable[[], tuple[Any, Any]]) -> Ready:
        q, model = made()

        def run() -> Found:
            result = fit(q, model, tolerance=1e-6, progress=False)
            return lambda: read_fit(result, q)

        return run

    made = dict(same_results.problems())
    yield from ((f"same results: {name}", lambda name=name: prepare_regression(made[name])) for name in SAME)


def find_cases() -> dict[str, Callable[[], Ready]]:
    """Every case by name; each makes its data, and gives what runs."""
    return SEVEN | dict(find_method_steps()) | dict(find_regressions())


@contextlib.contextmanager
def fix_settings() -> Iterator[None]:
    """One thread and double precision, and the generator of torch afterwards as it was."""
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    torch.set_num_threads(1)
    torch.set_default_dtype(DTYPE)
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)


def prepare_case(make: Callable[[], Ready]) -> Ready:
    """A case with its data made, which begins with the same seed each time; to be made and run within `alone`."""
    torch.manual_seed(0)
    run = make()

    def seeded() -> Found:
        torch.manual_seed(1)
        return run()

    return seeded


def format_numbers(found: dict[str, Numbers]) -> str:
    """All of them as JSON, with a line for each entry of a case."""
    blocks = []
    for name, entries in found.items():
        lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in entries.items())
        blocks.append(f" {json.dumps(name)}: {{\n{lines}\n }}")
    return "{\n" + ",\n".join(blocks) + "\n}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose names contain this")
    only = parser.parse_args().only
    with fix_settings():
        print(format_numbers({name: prepare_case(make)()() for name, make in find_cases().items() if only in name}))


if __name__ == "__main__":
    main()
