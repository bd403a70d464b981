"""Linear regressions with normal errors; coefficients have flat priors unless said otherwise."""

from collections.abc import Callable

import torch
from torch import Tensor

from .densities import cauchy, normal
from .model import Model, Values
from .transforms import positive, real

Prior = Callable[[Values], Tensor]


def regression(y: Tensor, *columns: Tensor, prior: Prior | None = None) -> Model:
    """y ~ normal(β₁ + β₂ column₁ + …, σ)."""
    return through_origin(y, torch.stack([torch.ones_like(y), *columns], -1), prior)


def through_origin(y: Tensor, X: Tensor, prior: Prior | None = None) -> Model:
    """y ~ normal(X β, σ)."""

    def log_density(p: Values) -> Tensor:
        log_likelihood = normal(y, p["beta"] @ X.mT, p["sigma"][..., None]).sum(-1)
        return log_likelihood if prior is None else log_likelihood + prior(p)

    return Model({"beta": real(X.shape[-1]), "sigma": positive()}, log_density)


def cauchy_scale(p: Values) -> Tensor:
    return cauchy(p["sigma"], 2.5)


# ---------------------------------------------------------------- simulated


def blr(data: Values) -> Model:
    def prior(p: Values) -> Tensor:
        return normal(p["beta"], 0, 10).sum(-1) + normal(p["sigma"], 0, 10)

    return through_origin(data["y"], data["X"], prior)


# ---------------------------------------------------------------- earnings and height


def earn_height(data: Values) -> Model:
    return regression(data["earn"], data["height"])


def logearn_height(data: Values) -> Model:
    return regression(data["earn"].log(), data["height"])


def log10earn_height(data: Values) -> Model:
    return regression(data["earn"].log10(), data["height"])


def logearn_height_male(data: Values) -> Model:
    return regression(data["earn"].log(), data["height"], data["male"])


def logearn_logheight_male(data: Values) -> Model:
    return regression(data["earn"].log(), data["height"].log(), data["male"])


def logearn_interaction(data: Values) -> Model:
    height, male = data["height"], data["male"]
    return regression(data["earn"].log(), height, male, height * male)


# ---------------------------------------------------------------- test scores of children


def kidscore_momhs(data: Values) -> Model:
    return regression(data["kid_score"], data["mom_hs"], prior=cauchy_scale)


def kidscore_momiq(data: Values) -> Model:
    return regression(data["kid_score"], data["mom_iq"], prior=cauchy_scale)


def kidscore_interaction(data: Values) -> Model:
    school, iq = data["mom_hs"], data["mom_iq"]
    return regression(data["kid_score"], school, iq, school * iq, prior=cauchy_scale)


def kidscore_interaction_c(data: Values) -> Model:
    school, iq = data["mom_hs"] - data["mom_hs"].mean(), data["mom_iq"] - data["mom_iq"].mean()
    return regression(data["kid_score"], school, iq, school * iq)


def kidscore_interaction_c2(data: Values) -> Model:
    school, iq = data["mom_hs"] - 0.5, data["mom_iq"] - 100
    return regression(data["kid_score"], school, iq, school * iq)


def kidscore_mom_work(data: Values) -> Model:
    return regression(data["kid_score"], *levels(data["mom_work"], 2, 3, 4))


# ---------------------------------------------------------------- yields of mesquite bushes


def mesquite(data: Values) -> Model:
    names = ("diam1", "diam2", "canopy_height", "total_height", "density", "group")
    return regression(data["weight"], *(data[name] for name in names))


def logmesquite(data: Values) -> Model:
    names = ("diam1", "diam2", "canopy_height", "total_height", "density")
    return regression(data["weight"].log(), *(data[name].log() for name in names), data["group"])


def logmesquite_logvolume(data: Values) -> Model:
    volume = data["diam1"] * data["diam2"] * data["canopy_height"]
    return regression(data["weight"].log(), volume.log())


def logmesquite_logvas(data: Values) -> Model:
    area, shape = data["diam1"] * data["diam2"], data["diam1"] / data["diam2"]
    volume = area * data["canopy_height"]
    logs = (x.log() for x in (volume, area, shape, data["total_height"], data["density"]))
    return regression(data["weight"].log(), *logs, data["group"])


# ---------------------------------------------------------------- party identification in national elections


def nes(data: Values) -> Model:
    ages = levels(data["age_discrete"], 2, 3, 4)
    before, after = (data["real_ideo"], data["race_adj"]), (data["educ1"], data["gender"], data["income"])
    return regression(data["partyid7"], *before, *ages, *after)


def levels(factor: Tensor, *values: int) -> list[Tensor]:
    """One indicator a value."""
    return [(factor == value).to(factor.dtype) for value in values]
