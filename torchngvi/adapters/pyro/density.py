"""The log joint of a Pyro model in unconstrained space, for all draws at once.

    log p(θ) = Σ_sites scale · mask · log p(x_site | parents) + Σ_latents log|∂x/∂θ|,        x = biject_to(support)(θ)

as `pyro.infer.mcmc.util.initialize_model` has it for one θ, and Trace_ELBO with an AutoContinuous guide (Kucukelbir et
al. 2017, Eq 5); the log Jacobian is neither scaled nor masked.  Discrete sites that are marked for parallel
enumeration are summed out.

All draws are evaluated in one run of the model inside an outermost plate, if the model broadcasts over it; else one θ
at a time under `torch.func.vmap`, else one after another.  Which of them is right is not assumed but tried, at three
points, against the last.
"""

import string
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Self, final

import pyro
import torch
from pyro import poutine
from pyro.ops.contract import contract_to_tensor
from pyro.poutine.trace_struct import Trace
from torch import Tensor
from torch.distributions import biject_to

from torchngvi.adapters.pyro.sites import (
    Enumerated,
    SameIndices,
    Values,
    check_latents,
    is_enumerated,
    is_subsampled,
    latents_of,
    prototype,
    random_sites,
)
from torchngvi.errors import InputError
from torchngvi.interfaces import Posterior, Target

Batched = Callable[[Tensor], Tensor]  # (S, D) -> (S,)

_PLATE = "_torchngvi_draws"
_POINTS, _SPREAD = 3, 0.1  # where the ways to batch are compared, around the initial θ


@final
class ModelLogJoint(Target):
    """log p(data, θ) of a Pyro model over unconstrained θ; see `log_joint`.

    Args:
        model: a Pyro model.
        args, kwargs: of the model.
        latents: a trace whose latent sites make up θ; by default all of the model's that are continuous.

    Raises:
        InputError: latent sites that θ cannot hold, a density that is NaN at the initial point; on use, a model
            whose sites change from run to run.
    """

    temperature = 1.0

    def __init__(
        self,
        model: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        latents: Trace | None = None,
    ) -> None:
        self.model, self.args, self.kwargs = model, args, dict(kwargs or {})
        self.layout, self.initial = prototype(model, args, self.kwargs, latents)
        self._indices: dict[str, Tensor] = {}
        self._enumerates, self._nesting = False, 0
        trace = self._trace(self.layout.constrained(self.initial)[0])
        check_latents(trace)
        uncovered = [site["name"] for site in latents_of(trace)]
        if uncovered:
            raise InputError(
                f"the guide must cover every continuous latent site of the model; it lacks {', '.join(uncovered)}. "
                "Build it on the whole model, or fit it beside the others with Trace_ELBO."
            )
        sites = [site for site in trace.nodes.values() if site["type"] == "sample"]
        frames: list[Any] = [frame for site in sites for frame in site["cond_indep_stack"] if frame.vectorized]
        self._nesting = max((-frame.dim for frame in frames), default=0)
        self._enumerates = any(is_enumerated(site) for site in sites)
        self.comparable = not self._indices and not any(map(is_subsampled, frames))
        self.batched_by, self._batched = self._best_way()

    @property
    def target(self) -> "ModelLogJoint":
        """The target to fit: itself."""
        return self

    @property
    def dim(self) -> int:
        """D."""
        return self.layout.dim

    def unpack(
        self,
        theta: Tensor,  # (*sample, D)
    ) -> Values:
        """Constrained values (*sample, *shape) by the name of the site."""
        return self.layout.constrained(theta)[0]

    def pack(
        self,
        values: Mapping[str, Tensor],  # (*sample, *shape) each
    ) -> Tensor:
        """The inverse of `unpack`, θ (*sample, D).

        Raises:
            InputError: a site without a value.
        """
        return self.layout.unconstrained(values)

    def on(self, *args: Any, **kwargs: Any) -> Self:
        """Go on with other arguments of the model, of the same structure, and with new random subsamples."""
        self.args, self.kwargs = args, kwargs
        self._indices.clear()
        return self

    def log_joint(self, theta: Tensor) -> Tensor:
        """θ (*sample, D) -> (*sample,)."""
        if theta.shape[-1:] != (self.dim,):
            raise InputError(f"theta must end in D = {self.dim}; got shape {tuple(theta.shape)}.")
        return self._batched(theta.reshape(-1, self.dim)).reshape(theta.shape[:-1])

    __call__ = log_joint

    def check(self, q: Posterior) -> None:
        """Raise for a q of another size or dtype."""
        if q.dim != self.dim or q.batch_shape:
            raise InputError(
                f"the model has {self.dim} unconstrained latents and q is over {(*q.batch_shape, q.dim)}; "
                f"build one q with dim={self.dim}."
            )
        if q.mean_probe.dtype != self.initial.dtype:
            raise InputError(
                f"the latents of the model are in {self.initial.dtype} and q in {q.mean_probe.dtype}; "
                f"build q with dtype={self.initial.dtype}, or convert one of them."
            )

    def tensors(self) -> tuple[Tensor, ...]:
        """Unknown, as for any function."""
        return ()

    # -------------------------------------------------------------------------------- one run of the model

    def _run(self, values: Values, plate: pyro.plate | None = None) -> Trace:
        """The model at these values, with log probabilities at its sites."""
        trace = self._trace(values, plate)
        moved = [name for name in values if name not in trace] + [site["name"] for site in latents_of(trace)]
        if moved:
            raise InputError(
                f"the model must have the same latent sites in each run; {', '.join(moved)} came or went. "
                "Draw every site in every run, and choose between them with torch.where or a mask."
            )
        with pyro.validation_enabled(False):
            trace.compute_log_prob()
        return trace

    def _trace(self, values: Values, plate: pyro.plate | None = None) -> Trace:
        model = self.model
        if self._enumerates:
            model = Enumerated(-1 - self._nesting - (plate is not None))(model)
        model = poutine.condition(model if plate is None else plate(model), values)
        with pyro.validation_enabled(False), SameIndices(self._indices):
            return poutine.trace(model).get_trace(*self.args, **self.kwargs)

    def _one(self, theta: Tensor) -> Tensor:
        """(D,) -> ()."""
        values, log_jacobian = self.layout.constrained(theta)
        return log_jacobian + self._total(self._run(values))

    def _total(self, trace: Trace) -> Tensor:
        if self._enumerates:
            return contract_to_tensor(*_factors(trace))
        return sum(site["log_prob_sum"] for site in random_sites(trace))

    def _by_plate(self, theta: Tensor) -> Tensor:
        """All draws in one run, the dimension of draws on the left of those of the plates."""
        count, room = len(theta), (1,) * self._nesting
        if self._enumerates and count == 1:  # the packing of factors drops dimensions of size one
            return self._by_loop(theta)
        values, log_jacobian = self.layout.constrained(theta, self._nesting)
        with pyro.validation_enabled(False):
            plate = pyro.plate(_PLATE, count, dim=-1 - self._nesting)
        trace = self._run(values, plate)
        if self._enumerates:
            tree, dims = _factors(trace)
            draws = frozenset(trace.plate_to_symbol[_PLATE])
            return log_jacobian + contract_to_tensor(tree, dims, target_ordinal=draws)
        for site in random_sites(trace):
            log_prob = site["log_prob"]
            shape = torch.broadcast_shapes(log_prob.shape, (count, *room))
            log_jacobian = log_jacobian + log_prob.expand(shape).reshape(count, -1).sum(-1)
        return log_jacobian

    def _by_vmap(self, theta: Tensor) -> Tensor:
        if self._enumerates:
            return self._by_vmap_and_contraction(theta)
        return torch.func.vmap(self._one, randomness="same")(theta)

    def _by_vmap_and_contraction(self, theta: Tensor) -> Tensor:
        """The factors of each draw by vmap, which cannot take Pyro's contraction; their contraction as of one plate."""
        names: list[tuple[frozenset, str]] = []
        summed: set[str] = set()

        def factors(one: Tensor) -> tuple[Tensor, list[Tensor]]:
            values, log_jacobian = self.layout.constrained(one)
            tree, dims = _factors(self._run(values))
            summed.update(dims)
            terms = [(plates, term) for plates, some in tree.items() for term in some]
            names.extend((plates, term._pyro_dims) for plates, term in terms)  # type: ignore[attr-defined]
            return log_jacobian, [term for _, term in terms]

        log_jacobian, terms = torch.func.vmap(factors, randomness="same")(theta)
        draw = next(letter for letter in string.ascii_letters if letter not in "".join(dims for _, dims in names))
        tree: OrderedDict[frozenset, list[Tensor]] = OrderedDict()
        for (plates, dims), term in zip(names, terms, strict=True):
            term._pyro_dims = draw + dims  # type: ignore[attr-defined]
            tree.setdefault(plates | {draw}, []).append(term)
        return log_jacobian + contract_to_tensor(tree, summed, target_ordinal=frozenset(draw))

    def _by_loop(self, theta: Tensor) -> Tensor:
        return torch.stack([self._one(each) for each in theta.unbind()])

    # -------------------------------------------------------------------------------- which way

    def _best_way(self) -> tuple[str, Batched]:
        """The first that agrees with the loop, in value and gradient."""
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(_POINTS, self.dim, generator=generator, dtype=torch.float64)
        points = self.initial + _SPREAD * noise.to(self.initial)
        self._check_density()
        for point in points:
            self._check_supports(point)
        truth, tolerance = _derivative(self._by_loop, points), torch.finfo(points.dtype).eps ** 0.5
        for name, way in (("plate", self._by_plate), ("vmap", self._by_vmap)):
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    answers = [_derivative(way, points), _derivative(way, points[:2])]
            except Exception:  # whatever a model does that was not written for a batch
                continue
            right = (
                torch.allclose(mine, its[: len(mine)], rtol=tolerance, atol=tolerance, equal_nan=True)
                for answer in answers
                for mine, its in zip(answer, truth, strict=True)
            )
            if all(right):
                return name, way
        return "loop", self._by_loop

    def _check_density(self) -> None:
        """Not NaN at the initial point, and data within their supports, where Pyro is set to look."""
        values = self.layout.constrained(self.initial)[0]
        trace = self._run(values)
        for site in random_sites(trace):
            if bool(site["log_prob"].isnan().any()):
                raise InputError(
                    f"the log density of the model is NaN at its initial point, at the site {site['name']!r}. "
                    "Look for missing data or parameters out of range there, or choose another init_loc_fn."
                )
        self._trace(values).compute_log_prob()

    def _check_supports(self, theta: Tensor) -> None:
        """The supports must be those of the prototype."""
        values = self.layout.constrained(theta)[0]
        trace = self._run(values)
        for site in self.layout.sites:
            u = theta[site.where].reshape(site.free)
            fn: Any = trace.nodes[site.name]["fn"]
            now = biject_to(fn.support)(u)
            if now.shape != site.shape or not torch.allclose(now, values[site.name], equal_nan=True):
                raise InputError(
                    f"the support of the latent site {site.name!r} depends on other latents, and θ has one transform "
                    "a site. Scale or shift a site of fixed support instead."
                )


def log_joint(model: Callable[..., Any], *args: Any, **kwargs: Any) -> ModelLogJoint:
    """log p(data, θ) = Σ log p(site) + log|∂x/∂θ| of a Pyro model, as a target for `torchngvi.fit`.

    Kucukelbir, Tran, Ranganath, Gelman and Blei: *Automatic differentiation variational inference*, 2017, Eq 5.

    Args:
        model: with plates, masks, `poutine.scale`, any support that `biject_to` knows, data in subsampled plates, and
            discrete latent sites that are marked for parallel enumeration.
        args, kwargs: of the model.

    Returns:
        A target of ``dim`` unconstrained latents, called with θ (*sample, D) for (*sample,); ``unpack(theta)`` gives
        the values of the sites, ``pack(values)`` is its inverse, ``initial`` a start.  Data are subsampled once, so
        that values and derivatives see the same rows; ``on(*args)`` subsamples anew.

    Raises:
        InputError: as `ModelLogJoint`.

    >>> import pyro.distributions as dist
    >>> def model():
    ...     scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    ...     pyro.sample("y", dist.Normal(0.0, scale), obs=torch.tensor(1.0))
    >>> density = log_joint(model)
    >>> density(torch.zeros(4, 1)).exp().round(decimals=4)  # N(0 | 0, 1) N(1 | 0, 1)
    tensor([0.0965, 0.0965, 0.0965, 0.0965])
    >>> density.unpack(torch.zeros(1))
    {'scale': tensor(1.)}
    """
    return ModelLogJoint(model, args, kwargs)


def _factors(trace: Trace) -> tuple[OrderedDict[frozenset, list[Tensor]], set]:
    """The log probabilities of a trace with enumerated sites by their plates, and the dimensions to sum out."""
    trace.pack_tensors()
    tree: OrderedDict[frozenset, list[Tensor]] = OrderedDict()
    for site in random_sites(trace):
        plates = frozenset(trace.plate_to_symbol[frame.name] for frame in site["cond_indep_stack"] if frame.vectorized)
        tree.setdefault(plates, []).append(site["packed"]["log_prob"])
    return tree, set(trace.symbol_to_dim) - set(trace.plate_to_symbol.values())


def _derivative(way: Batched, points: Tensor) -> tuple[Tensor, Tensor]:
    """Values and gradients."""
    with torch.enable_grad():
        leaf = points.clone().requires_grad_()
        values = way(leaf)
        if values.shape != points.shape[:1]:
            raise ValueError
        (gradient,) = torch.autograd.grad(values.sum(), leaf, allow_unused=True)
    return values.detach(), torch.zeros_like(points) if gradient is None else gradient
