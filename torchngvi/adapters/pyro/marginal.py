"""A guide that integrates local latents out: q is over what the members of plates share, and the members follow it.

With u the latents of the members and θ what they share, `torchngvi.marginal` takes u out of the log joint by Laplace's
approximation, q is fitted to what is left, and u is drawn given θ from N(û + w, H⁻¹), the Gaussian at its mode with the
mean corrected to first order (Tierney and Kadane 1986; Rue, Martino and Chopin 2009).  Members of one latent each are
integrated by quadrature, and drawn from their own distributions, where that changes the posterior of θ.  Where plates
have no members apart, u is the latent field, see `torchngvi.adapters.pyro.structure.latent_field`.  Where q does not
fit, `torchngvi.refine` bends it.
"""

import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Self, final

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.distributions import TorchDistribution
from pyro.infer.autoguide.initialization import init_to_median
from pyro.poutine.runtime import _DIM_ALLOCATOR
from torch import Tensor

from torchngvi.adapters.pyro.density import ModelLogJoint
from torchngvi.adapters.pyro.guide import AutoGaussian, LatentGaussian, refuse_loss
from torchngvi.adapters.pyro.layout import Layout, coordinate_names
from torchngvi.adapters.pyro.structure import latent_field
from torchngvi.arguments import read_flag, read_shares, read_size
from torchngvi.diagnostics.verdict import ABOUT, FAN, LIMITS, NOT, WORDS, Effort, Marginals, Verdict, name_of
from torchngvi.errors import InputError
from torchngvi.fitting.fit import fit
from torchngvi.fitting.records import FitResult
from torchngvi.latents.laplace import MarginalLaplace
from torchngvi.latents.summary import LaplaceError, Latents, Rule
from torchngvi.posteriors import CholeskyGaussian
from torchngvi.posteriors.gaussian import Gaussian
from torchngvi.refinement import RefinementWarning, refine
from torchngvi.refinement.fan import Density, LayeredGaussian

_NOT_FITTED = (
    "an AutoMarginal draws the members of plates given the data of its fit: call fit_guide(model, guide, *args) first, "
    "also after loading a state_dict or a pickle, neither of which holds the data."
)


@contextmanager
def _apart() -> Iterator[None]:
    """A context for runs of the model within the guide, apart from the handlers and the plates that are open there."""
    taken, _DIM_ALLOCATOR._stack = _DIM_ALLOCATOR._stack, []
    try:
        with poutine.block():
            yield
    finally:
        _DIM_ALLOCATOR._stack = taken


class JointDraws(TorchDistribution):
    """Draws of an `AutoMarginal`, without a density."""

    arg_constraints: dict[str, Any] = {}
    support = dist.constraints.real_vector

    def __init__(self, draw: Callable[[int], Tensor], dim: int, batch_shape: Sequence[int] = ()) -> None:
        self.draw = draw
        super().__init__(torch.Size(batch_shape), torch.Size((dim,)), validate_args=False)

    def expand(self, batch_shape: Sequence[int], _instance: Any = None) -> Self:
        """Draw as many again for a larger batch."""
        return type(self)(self.draw, self.event_shape[0], batch_shape)

    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Draw (*sample, *batch, D)."""
        shape = (*sample_shape, *self.batch_shape)
        return self.draw(math.prod(shape)).reshape(*shape, -1)

    def log_prob(self, value: Tensor) -> Tensor:
        """Refuse."""
        raise InputError("an AutoMarginal draws and has no density; for importance weights take an AutoGaussian.")


@final
class AutoMarginal(AutoGaussian):
    """A guide for hierarchical models, whose latents of groups are integrated out and not fitted.

    Use it where the verdict on an `AutoGaussian` is that a standard deviation of groups is too small: the members of a
    plate and the scale that they share are far from jointly Gaussian, and given the shared latents the members are
    nearly so.  `fit_guide` finds the locals as ``AutoGaussian(structure="auto")`` does, nested plates included.  Where
    terms join them, as factors that cross, pairs, walks and vectors, it takes all latents of several numbers that are
    Gaussian a priori given the others, and are no scale of others, together.  q, and the verdict, are over the shared
    latents.  The guide draws all sites jointly, for `pyro.infer.Predictive` too.
    Where a Gaussian of the shared latents does not fit, `torchngvi.refine` lays a fan over it: `refined` is then what
    the guide draws from, and the verdict is on it.  Where Laplace's approximation moves a mean the verdict says so.
    A model without such latents, or with nothing that they share, is fitted as by `AutoGaussian`.

    Args:
        model: a Pyro model, all of whose latents are continuous and that does not subsample.
        posterior: of the shared latents, of one of the classes that `AutoGaussian` takes with a structure.
        init_loc_fn, init_scale: as in `AutoGaussian`.
        name: under which Pyro's parameter store holds q.
        draws: of the shared latents, over which the distributions of the members are mixtures.
        refine: whether a fan is laid over a q that does not fit, for up to half of the budget of gradients.

    Attributes:
        refined: the density of the shared latents that refines q; None where q is as it was fitted.

    Raises:
        InputError: as `AutoGaussian` and `torchngvi.marginal`; on use, a guide that was not fitted, a loss of Pyro,
            which cannot fit it.

    >>> import pyro
    >>> from torchngvi.adapters.pyro import fit_guide
    >>> def model(y):
    ...     tau = pyro.sample("tau", dist.HalfNormal(1.0))
    ...     with pyro.plate("groups", len(y)):
    ...         b = pyro.sample("b", dist.Normal(0.0, tau))
    ...         pyro.sample("y", dist.Normal(b, 0.5), obs=y)
    >>> guide = AutoMarginal(model)
    >>> _ = pyro.set_rng_seed(0)
    >>> fit_guide(model, guide, torch.tensor([1.0, -1.0, 0.5]), options={"progress": False}).converged
    True
    >>> guide.posterior.dim, guide()["b"].shape
    (1, torch.Size([3]))
    """

    rounds = 20  # in which draws without a mode are drawn again
    looked = 32  # draws of q at which the error of Laplace's approximation is estimated
    trusted = 0.005  # nats between q and what it ought to be, up to which that approximation is kept
    _shared = 0  # coordinates of θ; 0 where nothing is integrated out
    _start: Tensor | None = None  # of the members
    _target: MarginalLaplace | None = None
    _members: tuple[Tensor, Latents] | None = None  # with q by whose draws they are

    def __init__(
        self,
        model: Callable[..., Any],
        posterior: Callable[..., Gaussian] = CholeskyGaussian,
        *,
        init_loc_fn: Callable[..., Any] = init_to_median,
        init_scale: float = 0.1,
        name: str = "AutoMarginal",
        draws: int = 256,
        refine: bool = True,
    ) -> None:
        super().__init__(model, posterior, structure="auto", init_loc_fn=init_loc_fn, init_scale=init_scale, name=name)
        self.draws = read_size("draws", draws, "counts draws of the shared latents")
        self.refine = read_flag("refine", refine)
        self.refined: Density | None = None

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        super()._setup_prototype(*args, **kwargs)
        found, why = self.structure, list(self.structure.reasons)
        with torch.inference_mode(False), torch.no_grad(), poutine.block():
            q = self._modules["q"]
            assert isinstance(q, Gaussian)
            # not by `density`, which looks for q in the parameter store, before q is over the shared latents alone
            mean, density = q.mean.double(), ModelLogJoint(self._bare[0], args, kwargs, self.prototype_trace)
            try:
                density.log_joint(mean[None])
            except RuntimeError:  # products of tensors of two dtypes
                mean = mean.to(q.mean)
            try:
                field = latent_field(density, found)
                if field:
                    self._share(found.with_field(field), mean)
                    self.integrate(density)
                    return
            except InputError as error:
                why.append(str(error).rstrip("."))
            self._shared, self._layout, self.q = 0, found, q
            if found.apart:
                self._share(found, mean)
                return
            why = why or ["no latents are local to the members of a plate that share others"]
            warnings.warn(f"AutoMarginal integrates nothing out: {'; '.join(dict.fromkeys(why))}.", stacklevel=2)

    def _share(self, layout: Layout, mean: Tensor) -> None:
        """Make q over the last level of a layout alone, of a mean (D,) in the order of the sites."""
        assert layout.order is not None
        layout.arrange(layout.order)  # of θ too: the members before what they share
        mean = mean[layout.order.to(mean.device)]
        self._layout, self._shared = layout, layout.levels[-1].size
        self._start = mean[: -self._shared].clone()
        self.q = self._posterior_class(
            self._shared, mean=mean[-self._shared :], scale=self.init_scale, dtype=mean.dtype
        )

    @property
    def integrates(self) -> bool:
        """Whether there are members to integrate out; known once the guide is set up."""
        return self._shared > 0

    def integrate(self, density: ModelLogJoint) -> MarginalLaplace:
        """The log joint of the shared latents."""
        assert self._start is not None

        def joint(theta: Tensor, members: Tensor) -> Tensor:
            return density.log_joint(self.structure.by_site(torch.cat([members, theta], -1)))

        q = self.gaussian("AutoMarginal")
        try:
            at = q.mean.detach().clone()
            target = MarginalLaplace(joint, self._start.to(q.mean), at, self.structure.forest)
            target.most = density.draws_at_once
            return target
        except InputError as error:
            if "misses the pair" in str(error):
                raise InputError(
                    "the guide has members of plates apart that this model or these data have together. Set another "
                    "guide up with them."
                ) from error
            if "at=" in str(error):  # an argument that a user of the guide does not have
                raise InputError(
                    "given the latents that they share, at their start, the members of plates have no mode or no "
                    "finite density. Give every latent a proper prior and each member data that are not masked, pass "
                    "another init_loc_fn, or fit the model with an AutoGaussian."
                ) from error
            raise

    def density(
        self, model: Callable[..., Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> ModelLogJoint:
        """The log joint of all latents, in the order of the sites."""
        if not self._shared:
            return super().density(model, args, kwargs)
        return ModelLogJoint(model, args, kwargs, self.prototype_trace)

    @property
    def members(self) -> Latents:
        """The distribution of the members in unconstrained space, a mixture over draws of the shared latents.

        Raises:
            InputError: a guide that was not fitted, members without a mode given the shared latents.
        """
        q = self.gaussian("AutoMarginal")
        here = torch.cat([q.mean, q.stddev])
        if self._members is None or not torch.equal(self._members[0], here):
            theta = self._shared_draws(self.draws, torch.Generator(q.device).manual_seed(0))  # the same in a copy
            assert self._target is not None
            with _apart():
                self._members = here, self._target.latents(theta)
        return self._members[1]

    def keep(self, target: MarginalLaplace | None, refined: Density | None = None) -> None:
        """Draw the members by a log joint from now on, and what they share from a density that refines q, if any."""
        self._target, self.refined, self._members = target, refined, None

    def shared(self, n: int) -> Tensor:
        """Draw the shared latents, (n, P).

        Raises:
            InputError: as `members`.
        """
        return self._shared_draws(n)

    def _shared_draws(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        def finite(target: MarginalLaplace, theta: Tensor) -> Tensor:
            return theta.where(target.log_joint(theta).isfinite()[:, None], math.nan)

        return self._drawn(n, finite, generator)

    def draw(self, n: int) -> Tensor:
        """Draw all latents jointly, (n, D), unconstrained, in the order of the sites.

        Shared latents given which the members have no mode are drawn again, as a fit passes such θ by.

        Raises:
            InputError: as `members`.
        """
        drawn = self._drawn(n, lambda target, theta: torch.cat([target.draw(theta), theta], -1))
        return self.structure.by_site(drawn.to(self._init_loc()))

    @torch.no_grad()
    def _drawn(
        self, n: int, made: Callable[[MarginalLaplace, Tensor], Tensor], generator: torch.Generator | None = None
    ) -> Tensor:
        """What is made of draws of the shared latents, (n, ..), without those of which it is NaN."""
        if self._target is None:
            raise InputError(_NOT_FITTED)
        q, kept = self.gaussian("AutoMarginal"), list[Tensor]()
        for _ in range(self.rounds):
            source = q.sample((n,), generator) if self.refined is None else self.refined.sample(n, generator)
            theta = source.to(q.mean)
            with _apart():
                drawn = made(self._target, theta)
            kept.append(drawn[drawn.isfinite().all(-1)])
            if sum(map(len, kept)) >= n:
                return torch.cat(kept)[:n]
        raise InputError(
            f"given the shared latents the members have a mode at {sum(map(len, kept))} of {self.rounds * n} draws "
            "of q, which is too few to integrate them out. Fit the model with an AutoGaussian."
        )

    def sample_latent(self, *args: Any, **kwargs: Any) -> Tensor:
        """Draw all latents jointly, (D,), as the auxiliary site of the guide."""
        if not self._shared:
            return super().sample_latent(*args, **kwargs)
        refuse_loss("AutoMarginal is fitted by fit_guide alone")
        latent = JointDraws(self.draw, self.structure.dim)
        return pyro.sample(f"_{self._pyro_name}_latent", latent, infer={"is_auxiliary": True})

    def median(self, *args: Any, **kwargs: Any) -> Any:
        """The median of each latent, by name."""
        return {name: value[0] for name, value in self.quantiles([0.5], *args, **kwargs).items()}

    @torch.no_grad()
    def quantiles(self, quantiles: Any, *args: Any, **kwargs: Any) -> Any:
        """The quantiles of each latent, those of the members of their mixtures over the shared latents."""
        if not self._shared:
            return super().quantiles(quantiles, *args, **kwargs)
        q, members, found = self.gaussian("AutoMarginal"), self.members, dict[str, list[Tensor]]()
        for level in torch.as_tensor(read_shares("quantiles", quantiles)).flatten().tolist():
            normal = q.mean + q.stddev * torch.special.ndtri(torch.tensor(level, dtype=torch.float64)).to(q.mean)
            shared = normal if self.refined is None else self.refined.quantile(level)[0].to(q.mean)
            theta = torch.cat([members.quantile(level), shared]).to(self._init_loc())
            for site, value in self._unpack_latent(self.structure.by_site(theta)):
                found.setdefault(site["name"], []).append(torch.distributions.biject_to(site["fn"].support)(value))
        return {name: torch.stack(values) for name, values in found.items()}

    def get_posterior(self, *args: Any, **kwargs: Any) -> LatentGaussian:
        """The Gaussian over all latents, where nothing is integrated out.

        Raises:
            InputError: members that are integrated out; `posterior` is of the shared latents alone.
        """
        if self._shared:
            raise InputError("an AutoMarginal has no Gaussian over all latents; take an AutoGaussian for that.")
        return super().get_posterior(*args, **kwargs)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        own = f"{prefix}refined."
        fan = {name.removeprefix(own): value for name, value in state_dict.items() if name.startswith(own)}
        self.keep(None, LayeredGaussian.from_state_dict(fan) if fan else None)  # the data are those of another fit
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def laplace_approximation(self, *args: Any, **kwargs: Any) -> Self:
        """Refuse: the members are integrated out by their own.

        Raises:
            InputError: always, where members are integrated out.
        """
        self.setup(*args, **kwargs)
        if self._shared:
            raise InputError("the Laplace approximation of all latents is that of an AutoGaussian; take one.")
        return super().laplace_approximation(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        """Without the data of the fit."""
        return {**super().__getstate__(), "_target": None, "_members": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        new = super().__deepcopy__(memo)
        new.keep(self._target, new.refined)
        return new


def fit_marginal(guide: AutoMarginal, density: ModelLogJoint, options: dict[str, Any]) -> FitResult:
    """Fit q over the shared latents, bend it where it does not fit, and say how far off the integral may be."""
    density.check_comparable("fit_guide")
    guide.keep(None)
    target, began = guide.integrate(density), time.monotonic()
    order, names = guide.structure.order, coordinate_names(guide.structure.sites)
    assert order is not None
    names = [names[k] for k in order[-target.dim :].tolist()]
    result, refined, error = fit(guide.posterior, target, **options).named(names), None, None
    cost = _cost_of_columns(target, result.gradients)
    guide.keep(target)
    target.begin_at(guide.gaussian("AutoMarginal").mean.detach().clone())
    exact = target.by_quadrature(Rule.of())
    rest = _left(options, result, began)
    try:
        if time.monotonic() - began >= (options.get("max_seconds") or math.inf):
            raise InputError("the time was used up before Laplace's approximation was looked at.")
        theta = guide.shared(guide.looked)
        error = (target.laplace_error(theta) if exact is None else target.error_beside(exact, theta)).named(names)
        said = str(error)
        if exact is not None and rest is not None and not error.nats <= guide.trusted:
            again = fit(guide.posterior, exact, **rest).named(names)
            result = replace(again, gradients=again.gradients + result.gradients, values=again.values + result.values)
            target, rest = exact, _left(options, result, began)
            guide.keep(target)
            error, said = None, target.quadrature_error(theta)
    except InputError as failure:
        said = str(failure)
    if guide.refine and result.converged and result.verdict.word in (ABOUT, NOT) and rest is not None:
        result, refined = _refined(result)
        guide.keep(target, refined)
    examination = result.examination if error is None else _judged(result.verdict, error)
    return replace(result, examination=examination, reason=f"{result.reason.rstrip('.')}; {said}{cost}")


def _cost_of_columns(target: MarginalLaplace, gradients: int, many: int = 32) -> str:
    """Say by how many products with Hessians a fit took its gradients, where a Hessian has many columns of its own."""
    if target.colours <= many or not gradients:
        return ""
    return (
        f" The {target.latents_dim} latents that are integrated out have a Hessian of {target.colours} columns to be "
        f"computed one by one: each of the {gradients:,} gradients of what they share took about "
        f"{target.curvature.products / gradients:,.0f} products with it, a gradient of the model or two each. Written "
        "so that each latent is Gaussian given its neighbours, as walks are, few columns suffice."
    )


def _judged(verdict: Verdict, error: LaplaceError) -> Verdict:
    """The verdict with the error of Laplace's approximation, by the limits of a mean that is off."""
    shift = error.shift.abs()
    worst = int(shift.argmax())
    off, known = float(shift[worst]), error.shifts_known and verdict.word in WORDS
    word = NOT if off >= LIMITS.off[1] else ABOUT
    if not known or off < LIMITS.off[0] or WORDS.index(word) <= WORDS.index(verdict.word):
        return verdict
    clause = f"{name_of(error.names, worst)}: mean off by about {off:.2g} sd by Laplace's approximation"
    return replace(verdict, word=word, reasons=(clause, *verdict.reasons))


def _left(options: dict[str, Any], result: FitResult, began: float) -> dict[str, Any] | None:
    """The options with what is left of the budgets; None where less than half is, or a file is of the first fit."""
    left = {**options}
    for name, used in (("max_gradients", result.gradients), ("max_seconds", time.monotonic() - began)):
        if options.get(name) is not None:
            left[name] = options[name] - used
            if left[name] < used:
                return None
    return left if options.get("checkpoint") is None else None


def _refined(result: FitResult) -> tuple[FitResult, Density | None]:
    """Lay a fan over q; the result, whose verdict is on the fan, and the density, if there is one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RefinementWarning)  # the verdict says it
        found = refine(result, kind="fan")
    spent = replace(result, gradients=result.gradients + found.gradients, values=result.values + found.values)
    if found.kind != "fan":
        return spent, None
    mean, covariance = found.posterior.moments()
    marginals = Marginals(mean, covariance.diagonal().sqrt(), result.names)
    effort = Effort(found.gradients, found.values, 0, ())
    second = found.second
    verdict = Verdict(second.word, second.reasons, marginals, None, second.sampled, (), effort, family=FAN)
    reason = f"{result.reason.rstrip('.')}; {found.reason}"
    return replace(spent, examination=verdict, reason=reason), found.posterior
