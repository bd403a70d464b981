"""How each model of Pyro's examples is called, with its data, or why a script has nothing for the guide to fit.

`CASES` are models, made from the imported script; `APART` are the scripts without one.  See
`benchmarks/pyro_examples.py`, which runs them.
"""

import csv
from argparse import Namespace
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import config_enumerate
from pyro.infer.autoguide import init_to_value

from torchngvi import DiagonalGaussian
from torchngvi.adapters.pyro import AutoGaussian

SIMULATED = "data simulated"


class Problem(NamedTuple):
    """A model with its arguments and, where it is not the default, the guide."""

    model: Callable[..., Any]
    args: tuple[Any, ...] = ()
    note: str = ""
    guide: Any = None
    batches: Iterable[Any] | None = None
    steps: int = 0  # of `NaturalSVI`, for models with parameters


class Case(NamedTuple):
    """A model of a script."""

    script: str
    model: str
    what: str
    build: Callable[[ModuleType], Problem]


# ------------------------------------------------------------------------------------ air, baseball, capture


def air(module: ModuleType) -> Problem:
    torch.set_default_dtype(torch.float32)  # of its parameters
    model = module.AIR(2, 10, 5, 8, 10, encoder_net=[8], decoder_net=[8], predict_net=[8], bl_predict_net=[8])
    return Problem(model.model, (torch.rand(4, 10, 10), 4), f"4 images of 10 x 10, {SIMULATED}")


HITS = [18.0, 17, 16, 15, 14, 14, 13, 12, 11, 11, 10, 10, 10, 10, 10, 9, 8, 7]  # Efron and Morris 1975


def baseball(name: str) -> Callable[[ModuleType], Problem]:
    return lambda module: Problem(getattr(module, name), (torch.full((18,), 45.0), torch.tensor(HITS)))


def capture(name: str) -> Callable[[ModuleType], Problem]:
    def build(module: ModuleType) -> Problem:
        folder = Path(str(module.__file__)).parent
        history, sex = (
            torch.tensor([[float(x) for x in row[1:]] for row in csv.reader((folder / file).open())])
            for file in ("dipper_capture_history.csv", "dipper_sex.csv")
        )
        return Problem(getattr(module, name), (history, sex[:, 0]))

    return build


# ------------------------------------------------------------------------------------ contrib


def autoname_mixture(module: ModuleType) -> Problem:
    return Problem(module.model, (torch.tensor([0.0, 1.0, 2.0, 20.0, 30.0, 40.0]), 2))


def scoping_mixture(module: ModuleType) -> Problem:
    return Problem(config_enumerate(module.model), (2, torch.tensor([0.0, 1.0, 2.0, 20.0, 30.0, 40.0])))


def tree(steps: int) -> Callable[[ModuleType], Problem]:
    def build(module: ModuleType) -> Problem:
        foo, bar = torch.tensor(1.0), [torch.tensor(x) for x in (0.0, 1.0, 2.0)]
        noun = {"concrete": torch.tensor(4.0), "abstract": torch.tensor(6.0)}
        data = {"foo": foo, "bar": bar, "baz": {"noun": noun, "verb": torch.tensor(2.0)}}
        return Problem(module.model, (data,), "" if steps else "its parameters stay where they are", steps=steps)

    return build


def sir(module: ModuleType) -> Problem:
    args = Namespace(
        population=1000, recovery_time=7.0, incubation_time=0.0, duration=20, forecast=0, min_obs_portion=0.01
    )
    args.__dict__.update(max_obs_portion=0.99, heterogeneous=False, overdispersion=0.0, concentration=float("inf"))
    args.__dict__.update(basic_reproduction_number=1.5, response_rate=0.5)
    model = module.Model(args, module.generate_data(args)["obs"])
    return relaxed(model)


def regional(module: ModuleType) -> Problem:
    args = Namespace(population=1000, coupling=0.1, recovery_time=7.0, duration=20, forecast=0, num_regions=3)
    args.__dict__.update(basic_reproduction_number=1.5, response_rate=0.5, min_observations=3)
    return relaxed(module.Model(args, module.generate_data(args)["obs"]))


def relaxed(model: Any) -> Problem:
    """The continuous model that `fit_svi` of a CompartmentalModel fits, at the start that it has."""
    start = init_to_value(values=model.heuristic(num_particles=1024), fallback=None)
    return Problem(
        model._relaxed_model,
        (),
        "the relaxed model of `fit_svi`",
        AutoGaussian(model._relaxed_model, init_loc_fn=start),
    )


def bart(module: ModuleType) -> Problem:
    hours = torch.arange(192.0)
    daily = torch.stack([torch.sin(hours * torch.pi / 12 + shift) for shift in (0.0, 1.0)], -1)
    data = 4 + daily + 0.1 * torch.randn(192, 2)
    return Problem(module.Model(), (data, torch.zeros(192, 0)), f"192 hours, {SIMULATED}")


def profile(module: ModuleType) -> Problem:
    data = module.generate_data(False, False, torch.device("cpu"))
    sequences = torch.stack([data[k][0] for k in range(len(data))])
    model = module.ProfileHMM(int(data.max_length * 1.1), data.alphabet_length)
    return Problem(model.model, (sequences.to(torch.get_default_dtype()), torch.tensor(1.0)), "its own small data")


def factor(module: ModuleType) -> Problem:
    data = module.generate_data(True, False, torch.device("cpu"))
    sequences = torch.stack([data[k][0] for k in range(len(data))])
    model = module.FactorMuE(data.max_length, data.alphabet_length, 2)
    arguments = (sequences.to(torch.get_default_dtype()), torch.tensor(1.0), torch.tensor(1.0))
    return Problem(model.model, arguments, "its own small data")


def glm(module: ModuleType) -> Problem:
    design = module.group_assignment_matrix(torch.tensor([50, 50]))
    data = {"y": (design @ torch.tensor([1.0, -1.0]) + torch.randn(100))}
    return Problem(pyro.condition(module.model, data=data), (design,), f"the model of the design, {SIMULATED}")


# ------------------------------------------------------------------------------------ schools, time series


def schools_sampled(module: ModuleType) -> Problem:
    data = module.data
    return Problem(module.conditioned_model, (module.model, data.sigma.double(), data.y.double()))


def schools(module: ModuleType) -> Problem:
    return Problem(module.model, (module.data.double(),))


def chorales(name: str, steps: int = 0, hidden: int = 3, batch: int | None = None) -> Callable[[ModuleType], Problem]:
    def build(module: ModuleType) -> Problem:
        args = Namespace(hidden_dim=hidden, nn_dim=8, nn_channels=2, jit=False, raftery_parameterization=False)
        sequences = torch.bernoulli(torch.full((5, 6, 4), 0.3))
        lengths = torch.tensor([6, 5, 6, 4, 6])
        note = f"5 sequences of 6 with 4 tones, {SIMULATED}"
        return Problem(getattr(module, name), (sequences, lengths, args, batch), note, steps=steps)

    return build


def incline(module: ModuleType) -> Problem:
    return Problem(module.model, (module.observed_data.double(),))


def allocation(module: ModuleType) -> Problem:
    args = Namespace(num_topics=3, num_words=12, num_docs=15, num_words_per_doc=16)
    return Problem(module.model, (module.model(args=args)[2], args), f"15 documents, 12 words, 3 topics, {SIMULATED}")


def correlations(module: ModuleType) -> Problem:
    return Problem(module.model, (torch.randn(200, 5),))


def mini(module: ModuleType) -> Problem:
    def model(data: torch.Tensor) -> None:
        loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(data), dim=-1):
            pyro.sample("obs", dist.Normal(loc, 1.0), obs=data)

    return Problem(model, (torch.randn(100) + 3.0,), "its model is inside main, and stands here again")


def seals(group: str | None, individual: str | None, steps: int = 0) -> Callable[[ModuleType], Problem]:
    def build(module: ModuleType) -> Problem:
        shape = (3, 2, 6)
        step, omega = dist.Gamma(2.0, 1.0).sample(shape), dist.Beta(2.0, 3.0).sample(shape)
        config = {
            "MISSING": 1e-6,
            "sizes": {"state": 2, "random": 2, "group": 2, "individual": 3, "timesteps": 6},
            "group": {"random": group, "fixed": None},
            "individual": {"random": individual, "fixed": None, "mask": torch.ones(3, 2, dtype=torch.bool)},
            "timestep": {"random": None, "fixed": None, "mask": torch.ones(shape, dtype=torch.bool)},
            "observations": {"step": step, "angle": dist.VonMises(0.0, 1.0).sample(shape), "omega": omega},
        }
        note = f"6 seals, 6 times, {SIMULATED}"
        return Problem(module.model_generic, (config,), note, steps=steps)

    return build


def banana(module: ModuleType) -> Problem:
    return Problem(module.model, (torch.tensor(1.15), torch.tensor(1.0)))


def epidemic(name: str) -> Callable[[ModuleType], Problem]:
    def build(module: ModuleType) -> Problem:
        args = Namespace(population=10, recovery_time=7.0, duration=10, forecast=0, min_observations=3)
        args.__dict__.update(basic_reproduction_number=1.5, response_rate=0.5)
        module.args = args  # which a function of the script reads as a global
        data = module.generate_data(args)["obs"]
        model, guide = getattr(module, name), None
        if name in ("continuous_model", "vectorized_model"):
            guide = AutoGaussian(model, init_loc_fn=init_to_value(values=module.heuristic_init(args, data)))
        return Problem(model, (args, data), "", guide)

    return build


def filtered(module: ModuleType) -> Problem:
    def model(ys: list[torch.Tensor]) -> None:
        system, state = module.SimpleHarmonicModel(1.0, 1.0), {}
        system.init(state, torch.tensor([1.0, 0.0]))
        for y in ys:
            system.step(state, y)

    return Problem(model, (list(torch.randn(20)),), f"its steps in one model, 20 times, {SIMULATED}")


def gamma_def(small: bool, mean_field: bool = False) -> Callable[[ModuleType], Problem]:
    def build(module: ModuleType) -> Problem:
        deep = module.SparseGammaDEF()
        if small:
            deep.top_width, deep.mid_width, deep.bottom_width, deep.image_size = 5, 4, 3, 16
        rows = 10 if small else 320
        data = torch.poisson(torch.rand(rows, deep.image_size) * 5)
        guide = AutoGaussian(deep.model, DiagonalGaussian) if mean_field else AutoGaussian(deep.model)
        size = f"{rows} images of {deep.image_size} pixels, {SIMULATED}"
        return Problem(deep.model, (data,), size, guide)

    return build


def sparse(module: ModuleType) -> Problem:
    X, Y, _, _ = module.get_data(N=60, P=10, S=3, Q=2, sigma_obs=0.15)
    hypers = {"expected_sparsity": 1.0, "alpha1": 3.0, "beta1": 1.0, "alpha2": 3.0, "beta2": 1.0, "alpha3": 1.0}
    return Problem(module.model, (X, Y, {**hypers, "c": 1.0}), "60 rows, 10 columns")


def rows(sized: bool) -> Callable[[ModuleType], Problem]:
    def build(module: ModuleType) -> Problem:
        X = torch.randn(1000)
        y = 1 + 2 * X + 0.5 * torch.randn(1000)
        model = module.Model(1000)
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, y), batch_size=100)
        return Problem(model, (), "a DataLoader of 100 rows a batch", AutoGaussian(model), loader)

    return build


def toy(module: ModuleType) -> Problem:
    prior, _, data = module.generate_data(500)
    return Problem(module.model, (prior, data, 500), "500 rows")


def decoded(name: str, *args: Any, **kwargs: Any) -> Callable[[ModuleType], Problem]:
    def build(module: ModuleType) -> Problem:
        model = getattr(module, name)(*args, **kwargs)
        return Problem(
            model.model, (torch.rand(8, 1, 28, 28).round(),), f"one batch of 8 images, {SIMULATED}", steps=40
        )

    return build


def semi(module: ModuleType) -> Problem:
    model = module.SSVAE(output_size=10, input_size=784, z_dim=5, hidden_layers=[8])
    return Problem(model.model, (torch.rand(4, 784).round(),), f"4 images without labels, {SIMULATED}", steps=10)


CASES = [
    Case("air/air.py", "", "attend, infer, repeat", air),
    *(
        Case("baseball.py", name, what, baseball(name))
        for name, what in {
            "fully_pooled": "one rate",
            "not_pooled": "18 rates",
            "partially_pooled": "Beta rates, Pareto",
            "partially_pooled_with_logit": "normal logits",
        }.items()
    ),
    *(
        Case("capture_recapture/cjs.py", f"model_{k}", f"Cormack-Jolly-Seber, {what}", capture(f"model_{k}"))
        for k, what in enumerate(["two rates", "rates in time", "random effects", "by sex", "sex and time"], start=1)
    ),
    Case("contrib/autoname/mixture.py", "", "mixture, discrete", autoname_mixture),
    Case("contrib/autoname/scoping_mixture.py", "", "mixture, a plate without size", scoping_mixture),
    Case("contrib/autoname/tree_data.py", "", "a tree of normals", tree(0)),
    Case("contrib/autoname/tree_data.py", "with its scales", "a tree of normals", tree(300)),
    Case("contrib/epidemiology/regional.py", "", "SIR in 3 regions", regional),
    Case("contrib/epidemiology/sir.py", "", "SIR", sir),
    Case("contrib/forecast/bart.py", "", "hierarchical forecast", bart),
    Case("contrib/mue/FactorMuE.py", "", "sequences, latent factors", factor),
    Case("contrib/mue/ProfileHMM.py", "", "sequences, profile", profile),
    Case("contrib/oed/ab_test.py", "", "linear model of a design", glm),
    Case("eight_schools/mcmc.py", "", "eight schools", schools_sampled),
    Case("eight_schools/svi.py", "", "eight schools in a plate", schools),
    *(
        Case("hmm.py", f"model_{k}", what, chorales(f"model_{k}", steps))
        for k, what, steps in [
            (0, "hidden Markov, loop over sequences", 0),
            (1, "hidden Markov", 0),
            (2, "autoregressive", 0),
            (5, "neural likelihood", 20),
            (6, "second order, parameters", 0),
            (7, "DiscreteHMM, neural likelihood", 40),
        ]
    ),
    Case("hmm.py", "model_3", "factorial", chorales("model_3", hidden=4)),
    Case("hmm.py", "model_4", "dynamic Bayesian network", chorales("model_4", hidden=4)),
    Case("inclined_plane.py", "", "a simulator", incline),
    Case("lda.py", "", "latent Dirichlet allocation", allocation),
    Case("lkj.py", "", "a correlation matrix", correlations),
    Case("minipyro.py", "", "a normal mean", mini),
    Case("mixed_hmm/model.py", "continuous effects", "hidden Markov, mixed", seals("continuous", "continuous")),
    Case("mixed_hmm/model.py", "with parameters", "hidden Markov, mixed", seals("continuous", "continuous", 20)),
    Case("mixed_hmm/model.py", "discrete effects", "hidden Markov, mixed", seals("discrete", "discrete")),
    Case("neutra.py", "", "a banana", banana),
    *(
        Case("sir_hmc.py", name, what, epidemic(name))
        for name, what in {
            "discrete_model": "SIR, counts",
            "reparameterized_discrete_model": "SIR, counts enumerated",
            "continuous_model": "SIR, quantised",
            "vectorized_model": "SIR, summed by hand",
        }.items()
    ),
    Case("smcfilter.py", "", "oscillator with noise", filtered),
    Case("sparse_gamma_def.py", "as it is", "deep exponential family", gamma_def(False)),
    Case("sparse_gamma_def.py", "mean field", "deep exponential family", gamma_def(False, True)),
    Case("sparse_gamma_def.py", "small", "deep exponential family", gamma_def(True)),
    Case("sparse_regression.py", "", "kernel interaction sampler", sparse),
    Case("svi_horovod.py", "", "regression in batches", rows(True)),
    Case("svi_lightning.py", "", "regression in batches", rows(True)),
    Case("svi_torch.py", "", "regression in batches", rows(True)),
    Case("toy_mixture_model_discrete_enumeration.py", "", "a network of three coins", toy),
    Case("vae/ss_vae_M2.py", "", "autoencoder, labels missing", semi),
    Case("vae/vae.py", "", "autoencoder", decoded("VAE", 4, 16)),
]

_AMORTISED = "its guide is a network from a row to its q, which no Gaussian over fixed latents replaces"
_SEARCH = "discrete choices, summed by search; no continuous latent"
_HELPER = "no model: called by the others"

APART: dict[str, tuple[str, str]] = {
    "air/main.py": ("trains air.py", _HELPER),
    "air/modules.py": ("networks of air.py", _HELPER),
    "air/viz.py": ("pictures of air.py", _HELPER),
    "contrib/cevae/synthetic.py": ("causal effects, autoencoder", _AMORTISED),
    "contrib/funsor/hmm.py": ("the models of hmm.py", "written for the funsor backend; see hmm.py"),
    "contrib/gp/sv-dkl.py": ("deep kernel, sparse Gaussian process", "its q is parameters of pyro.contrib.gp"),
    "contrib/oed/gp_bayes_opt.py": ("Bayesian optimisation", "no latent: a maximum of a Gaussian process"),
    "contrib/timeseries/gp_models.py": ("Gaussian processes in time", "no sample site: maximum likelihood"),
    "cvae/baseline.py": ("a classifier", "no latent"),
    "cvae/cvae.py": ("conditional autoencoder", _AMORTISED),
    "cvae/main.py": ("trains cvae.py", _HELPER),
    "cvae/mnist.py": ("data of cvae.py", _HELPER),
    "cvae/util.py": ("pictures of cvae.py", _HELPER),
    "dmm.py": ("deep Markov model", _AMORTISED),
    "eight_schools/data.py": ("data of the schools", _HELPER),
    "einsum.py": ("contractions of tensors", "no model: times einsum"),
    "mixed_hmm/experiment.py": ("trains mixed_hmm/model.py", _HELPER),
    "mixed_hmm/seal_data.py": ("data of mixed_hmm/model.py", _HELPER),
    "rsa/generics.py": ("rational speech acts", _SEARCH),
    "rsa/hyperbole.py": ("rational speech acts", _SEARCH),
    "rsa/schelling.py": ("a game of coordination", _SEARCH),
    "rsa/schelling_false.py": ("a game of coordination", _SEARCH),
    "rsa/search_inference.py": ("the search of rsa", _HELPER),
    "rsa/semantic_parsing.py": ("rational speech acts", _SEARCH),
    "scanvi/scanvi.py": ("single cells, autoencoder", _AMORTISED),
    "vae/utils/custom_mlp.py": ("networks of vae", _HELPER),
    "vae/utils/mnist_cached.py": ("data of vae", _HELPER),
    "vae/utils/vae_plots.py": ("pictures of vae", _HELPER),
    "vae/vae_comparison.py": ("autoencoder, by hand and in Pyro", _AMORTISED),
}
