"""Whether a location-scale site is better centred: the coordinates in which a Gaussian fits a hierarchical model best.

A latent y ~ N(μ, s²) whose μ and s are latents too is written with the weight w in [0, 1] as

    x ~ N(w μ, s^(2w)),        y = μ + s^(1-w) (x - w μ)

which is the same model for every w: as written at w = 1, which is best where data say much of y, and not centred at
w = 0 (Papaspiliopoulos, Roberts and Sköld 2007; Gorinova, Moore and Hoffman 2020).  Between the two

    w = 1 - s⁻² / h,        h = -∂²log p(data, θ)/∂y²

is the share of the precision of y that comes from the data, an element of the site at a time.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from pyro import poutine
from pyro.infer.reparam import LocScaleReparam
from torch import Tensor

from torchngvi.adapters.pyro.density import ModelLogJoint
from torchngvi.adapters.pyro.fitting import fit_guide, location_scale
from torchngvi.adapters.pyro.guide import AutoGaussian
from torchngvi.adapters.pyro.layout import unwrapped
from torchngvi.arguments import read_instance
from torchngvi.derivatives import mean_hessian_products
from torchngvi.errors import InputError

_AS_WRITTEN, _NOT_CENTRED, _BY_CURVATURE = "as written", "not centred", "by curvature"
_GAIN = 0.05  # nats below which the model stays as it is written: the noise of an ELBO
_TOLERANCE = 0.3  # of the fits that are compared: half its square is as many nats


@dataclass(frozen=True, eq=False)
class Centred:
    """A Pyro model whose location-scale sites have a weight of centring; `centred` makes one.

    Called with the arguments of the model it is a model itself, in which such a site b is ``b_decentered`` with b as a
    function of it: `Predictive` gives both.

    Attributes:
        model: the model as it is written.
        weights: of each site that is rewritten, of its shape: 1 as it is written, 0 not centred.
        elbos: that were reached, in nats, by the name of the weights.

    >>> print(Centred(print, {"b": torch.zeros(2)}, {"as written": -3.0, "not centred": -2.5}))
    b: weight 0.00 to 0.00
    ELBO -3.00 as written, -2.50 not centred
    """

    model: Callable[..., Any]
    weights: Mapping[str, Tensor]
    elbos: Mapping[str, float] = field(default_factory=dict)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model in the other coordinates."""
        config: Any = {name: LocScaleReparam(weight) for name, weight in self.weights.items()}
        return poutine.reparam(self.model, config)(*args, **kwargs)

    def __str__(self) -> str:
        lines = [f"{name}: weight {float(w.min()):.2f} to {float(w.max()):.2f}" for name, w in self.weights.items()]
        elbos = ", ".join(f"{value:.2f} {name}" for name, value in self.elbos.items())
        return "\n".join([*(lines or ["every site as written"]), f"ELBO {elbos}"])


def centred(
    model: Callable[..., Any],
    *args: Any,
    guide: Callable[..., AutoGaussian] = AutoGaussian,
    options: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Centred:
    """Write the location-scale sites of a model in the coordinates in which a Gaussian comes nearest to the posterior.

    Sites whose location or scale depends on other latents are looked at.  The model is fitted as it is written, with
    none of them centred, and with the weights 1 - s⁻²/h by the curvature h at the better of these two fits; what has
    the largest ELBO is returned.  All three have the same posterior of the sites of the model.

    Args:
        model: a Pyro model, as for `fit_guide`.
        args, kwargs: the arguments of the model.
        guide: makes a guide of a model.
        options: of the three fits, keywords of `torchngvi.fit`; their tolerance is 0.3 by default.

    Returns:
        The model, to be fitted by a guide of its own, with the weights and the three ELBOs.

    Raises:
        InputError: a model without such sites; as `fit_guide`.

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> _ = torch.manual_seed(0)
    >>> def model(y):
    ...     tau = pyro.sample("tau", dist.LogNormal(0.0, torch.tensor(1.0).double()))
    ...     with pyro.plate("groups", len(y)):
    ...         b = pyro.sample("b", dist.Normal(0.0, tau))
    ...         pyro.sample("y", dist.Normal(b, 3.0), obs=y)
    >>> y = torch.tensor([1.0, -2.0, 0.5]).double()
    >>> better = centred(model, y)
    >>> bool(better.weights["b"].max() < 0.5)  # the data say little of b
    True
    >>> result = fit_guide(better, AutoGaussian(better), y, options={"progress": False})
    """
    if options is not None:
        read_instance("options", options, Mapping, "are keywords of torchngvi.fit, such as {'tolerance': 0.1}, or None")
    density = ModelLogJoint(model, args, kwargs)
    names = location_scale(density)
    if not names:
        raise InputError(
            "the model has no latent site of a location-scale family whose location or scale is a latent too, or "
            "LocScaleReparam has rewritten them: there is nothing to centre."
        )
    chosen = {"progress": False, "examine": False, "tolerance": _TOLERANCE, **(options or {})}
    shapes = {name: density.initial.new_zeros(density.layout.shapes[name]) for name in names}
    tried: dict[str, tuple[float, Centred, AutoGaussian]] = {}

    def attempt(word: str, weights: Mapping[str, Tensor]) -> None:
        candidate = Centred(model, weights)
        fitted = guide(candidate)
        tried[word] = -fit_guide(candidate, fitted, *args, options=chosen, **kwargs).loss, candidate, fitted

    attempt(_AS_WRITTEN, {})
    attempt(_NOT_CENTRED, shapes)
    _, candidate, fitted = max(tried.values(), key=lambda each: each[0])
    own = fitted.density(candidate, args, kwargs)
    nodes: Any = own.trace(own.unpack(fitted.posterior.mean)).nodes  # with the values of the sites as they are written
    theta = density.pack({site.name: nodes[site.name]["value"] for site in density.layout.sites}).detach()
    attempt(_BY_CURVATURE, _by_curvature(density, names, theta))
    elbos = {word: elbo for word, (elbo, _, _) in tried.items()}
    best = max(elbos, key=lambda word: elbos[word] + _GAIN * (word == _AS_WRITTEN))
    return Centred(model, tried[best][1].weights, elbos)


def _by_curvature(density: ModelLogJoint, names: list[str], theta: Tensor, chunk: int = 256) -> dict[str, Tensor]:
    """The weights 1 - s⁻²/h at θ (D,)."""
    # chunk: copies of θ in one call
    trace, weights = density.trace(density.unpack(theta)), {}
    for site in density.layout.sites:
        if site.name not in names:
            continue
        columns = torch.arange(site.where.start, site.where.stop, device=theta.device)
        directions = torch.nn.functional.one_hot(columns, density.dim).to(theta)
        h = mean_hessian_products(density, theta[None], directions, chunk)[torch.arange(len(columns)), columns]
        node: Any = trace.nodes[site.name]
        prior = unwrapped(node["fn"]).scale.detach().pow(-2).expand(site.shape)
        weight = 1 - prior / h.reshape(site.shape)
        weights[site.name] = weight.nan_to_num(0.0, 0.0, 0.0).clamp(0.0, 1.0)
    return weights
