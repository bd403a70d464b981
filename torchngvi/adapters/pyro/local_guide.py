"""A guide for Pyro models whose plate of local latents is too large to be run at once.

    q(g, b) = N(g; m, V) Π_i N(b_i; c_i - K_iᵀg, S_i⁻¹)

For a model whose terms are log p(g) + Σ_i log p(y_i, b_i | g) a Gaussian with the precision in this arrow loses nothing
against a full covariance: where q is the best Gaussian, its precision is E_q[∇²ℓ], which has zeros between members.

`fit_guide` goes through the plate once, batch by batch, which leaves every member with a site.  From there each pass is
an evaluation of the bound as a function of q(g) alone, whose steps are those of `torchngvi.fit`.
"""

import math
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any, Self, final

import pyro
import pyro.distributions as dist
import torch
from pyro.distributions.util import sum_rightmost
from pyro.infer.autoguide import AutoGuide
from pyro.infer.autoguide.initialization import init_to_median
from torch import Tensor

from torchngvi.adapters.pyro.layout import Call
from torchngvi.adapters.pyro.local_density import PlateDensity, PlateLayout
from torchngvi.adapters.pyro.local_sites import FreshElbo, Globals, MemoisedBound, Sites, Visits, batches_of, fresh_elbo
from torchngvi.arguments import read_callable, read_instance, read_number, read_shares, read_size
from torchngvi.errors import InputError
from torchngvi.fitting.checkpoints import copied
from torchngvi.fitting.loop import Ending, Loop, checked_callbacks
from torchngvi.fitting.records import FitResult
from torchngvi.fitting.steps import Steps
from torchngvi.fitting.stopping import Criterion, Evaluations, NormBelow, Seconds, Stalled, Standing, Stop, joined
from torchngvi.interfaces import Coordinates
from torchngvi.methods import VN
from torchngvi.numerics import small_blocks
from torchngvi.optim import Status
from torchngvi.posteriors import PrecisionCholeskyGaussian

_PASSES = 100  # at most, unless options say otherwise
_STALL = 10  # rejected steps in a row after which nothing more is to be had
_KNOWN = ("tolerance", "max_evaluations", "max_seconds", "stop", "callbacks", "progress", "checkpoint")


class AutoLocalGaussian(AutoGuide):
    """A Gaussian guide with a stored site for each member of a subsampled plate, and a dense one over the globals.

    Take it for hierarchical models with local latents in one plate, ``with pyro.plate("patients", n,
    subsample_size=B)``, of which a run of the model sees B members.  The memory is that of n sites of (r + P)² numbers,
    with r latents of a member and P globals; a step costs a batch.  `fit_guide` fits it, without a learning rate.

    Globals and the locals of a member may each be several sites, in any supports; plates of rows within a member, run
    in full, are fine.  The cost grows with (r + P)²; a few tens of globals are many.

    That members do not read one another's latents is tried on the members of a run.  With a subsample of one there is
    no other member to try it with, and that the members are independent given the globals is taken on trust.

    Args:
        model: a Pyro model.
        plate: the name of the plate of the local latents.
        init_loc_fn: a strategy of `pyro.infer.autoguide.initialization`.
        init_scale: the standard deviation of every latent at the start, in unconstrained space.
        num_particles: the number of draws a batch and evaluation, even, and at least 2 (r + 1).

    Raises:
        InputError: on set-up, models it is not for (`PlateLayout`, `PlateDensity`), too few particles; on use, a guide
            that was not set up.

    >>> import pyro
    >>> from torchngvi.adapters.pyro import fit_guide
    >>> _ = torch.manual_seed(0)
    >>> y = torch.randn(200, 4, dtype=torch.float64) + torch.randn(200, 1, dtype=torch.float64)
    >>> def model(y):
    ...     mu = pyro.sample("mu", dist.Normal(torch.zeros((), dtype=torch.float64), 10.0))
    ...     with pyro.plate("patients", len(y), subsample_size=50) as index:
    ...         b = pyro.sample("b", dist.Normal(mu, 1.0))
    ...         pyro.sample("y", dist.Normal(b[:, None], 1.0).expand([50, 4]).to_event(1), obs=y[index])
    >>> guide = AutoLocalGaussian(model, "patients")
    >>> fit_guide(model, guide, y, options={"progress": False}).converged
    True
    >>> bool((guide.median()["mu"] - y.mean() * 0.9999).abs() < 1e-3), guide.median()["b"].shape
    (True, torch.Size([200]))
    """

    memo: Sites
    q: PrecisionCholeskyGaussian

    def __init__(
        self,
        model: Callable[..., Any],
        plate: str,
        *,
        init_loc_fn: Callable[..., Any] = init_to_median,
        init_scale: float = 0.1,
        num_particles: int = 16,
    ) -> None:
        read_callable("model", model, "is a function or a module that samples")
        read_callable("init_loc_fn", init_loc_fn, "is a strategy such as init_to_median")
        init_scale = read_number("init_scale", init_scale, "is a standard deviation in unconstrained space", above=0)
        plate = read_instance("plate", plate, str, "is the name of a plate")
        num_particles = read_size("num_particles", num_particles, "counts draws")
        super().__init__(model)
        self.plate, self.init_scale, self.num_particles = plate, init_scale, num_particles
        self._init_loc_fn = init_loc_fn

    def setup(self, *args: Any, **kwargs: Any) -> Self:
        """Run the model once with these arguments to lay out the sites, unless that was done before; returns the guide.

        Raises:
            InputError: as `PlateLayout`; too few particles.
        """
        if self.prototype_trace is None:
            trace: Any = Call(self.model, args, kwargs).prototype(self._init_loc_fn)
            with torch.inference_mode(False), torch.no_grad():
                layout = PlateLayout(trace, self.plate)
                if self.num_particles % 2 or self.num_particles < 2 * (layout.r + 1):
                    raise InputError(
                        f"num_particles is even and at least 2 (r + 1) = {2 * (layout.r + 1)}, for draws of a member's "
                        f"{layout.r} latents with the covariance I; got {self.num_particles}."
                    )
                for name in ("_INPUT", "_RETURN"):
                    trace.remove_node(name)
                self.layout, self._start = layout, layout.start(trace)
                self._frames = {s.name: trace.nodes[s.name]["cond_indep_stack"] for s in layout.sites}
                self._prototype_frames = {f.name: f for frames in self._frames.values() for f in frames}
                self.prototype_trace = trace
                self.memo = Sites(layout.size, self._start, self.init_scale)
                self.q = PrecisionCholeskyGaussian(layout.P, mean=self._start[1], scale=self.init_scale)
        return self

    @property
    def posterior(self) -> PrecisionCholeskyGaussian:
        """The posterior q(g) of the globals, in unconstrained space, (P,).

        Raises:
            InputError: a guide that was not set up.
        """
        if self.prototype_trace is None:
            raise InputError("the guide has no posterior before it has seen the model: call guide.setup(*args) first.")
        return self.q

    def visits(self, model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Visits:
        """The sites of the guide with the terms of a model, which visit members by their index, a batch at a time.

        Raises:
            InputError: as `setup` and `PlateDensity`.
        """
        self.setup(*args, **kwargs)
        with torch.inference_mode(False):
            density = PlateDensity(Call(model, args, kwargs), self.layout, self._start)
        return Visits(self.memo, density, self.num_particles)

    def elbo(self, *args: Any, **kwargs: Any) -> FreshElbo:
        """Estimate the ELBO over all members in nats, without bias, with its standard error, by one pass on new draws.

        Raises:
            InputError: as `visits`.
        """
        visits = self.visits(self.model, args, kwargs)
        return fresh_elbo(visits, self._top(), batches_of(visits))

    def _top(self) -> Globals:
        q = self.posterior
        return Globals(q.mean.detach(), q.precision_tril.detach())

    # -------------------------------------------------------------------------------- as a guide of Pyro

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Draw the globals, and the locals of a subsample of the plate given them; the values of the sites by name."""
        self.setup(*args, **kwargs)
        top, memo, layout, name = self._top(), self.memo, self.layout, self._pyro_name
        plates, mine = self._create_plates(*args, **kwargs), pyro.poutine.runtime.InferDict(is_auxiliary=True)
        shared = dist.MultivariateNormal(top.mean, precision_matrix=top.root @ top.root.mT)
        g = pyro.sample(f"_{name}_globals", shared, infer=mine)
        with plates[self.plate] as index:
            shape = (len(index), *(1,) * (-layout.dim_of_plate - 1))
            c, K, S = (x[index].reshape(*shape, *x.shape[1:]) for x in (memo.centre, memo.slope, memo.precision))
            given = dist.MultivariateNormal(c - (g[..., None, :] @ K)[..., 0, :], precision_matrix=S)
            b = pyro.sample(f"_{name}_locals", given, infer=mine)
        sample = g.shape[:1] if g.ndim > 1 else g.shape[:0]  # vectorised particles
        return self._sites_at(plates, b.reshape(*sample, len(index), layout.r), g.reshape(*sample, layout.P))

    def _sites_at(self, plates: dict[str, Any], b: Tensor, g: Tensor) -> dict[str, Tensor]:
        nesting = max((-f.dim for f in self._prototype_frames.values()), default=0)
        sample, result = g.shape[:-1], {}
        for site in self.layout.sites:
            u = self.layout.free(site, b, g)
            x = site.transform(u)
            each = site.transform.inv.log_abs_det_jacobian(x, u)
            if sample:
                room = (1,) * (nesting - site.batch_dims)
                x, each = (t.reshape(*sample, *room, *t.shape[len(sample) :]) for t in (x, each))
            event = len(site.shape) - site.batch_dims
            each = sum_rightmost(each, each.ndim - x.ndim + event)
            with ExitStack() as stack:
                for frame in self._frames[site.name]:
                    stack.enter_context(plates[frame.name])
                result[site.name] = pyro.sample(site.name, dist.Delta(x, log_density=each, event_dim=event))
        return result

    @torch.no_grad()
    def quantiles(self, quantiles: Iterable[float], *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """The quantiles of each latent at levels between 0 and 1, (levels, *shape), the plate at its full size."""
        top, memo = self._top(), self.memo
        root, _ = small_blocks.cholesky(memo.precision)
        own = small_blocks.inverse(root).square().sum(-2)
        across = torch.linalg.solve_triangular(top.root, memo.slope, upper=False).square().sum(-2)
        mean = memo.centre - top.mean @ memo.slope
        z = torch.special.ndtri(torch.as_tensor(read_shares("quantiles", quantiles)).to(mean))
        b = mean + z[:, None, None] * (own + across).sqrt()
        g = top.mean + z[:, None] * torch.cholesky_inverse(top.root).diagonal().sqrt()
        return {site.name: site.transform(self.layout.free(site, b, g)) for site in self.layout.sites}

    def median(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """The median of each latent, the plate at its full size."""
        return {name: value[0] for name, value in self.quantiles([0.5]).items()}


@final
class PassesOverPlate(Steps):
    """Passes over the members of a plate until the natural-gradient norm over all coordinates is small."""

    unit = "pass"

    def __init__(self, q: PrecisionCholeskyGaussian, visits: Visits, stop: Criterion, resumed: bool) -> None:
        self.visits, self.bound = visits, MemoisedBound(visits, stop.tolerance)
        self.resumed = resumed
        super().__init__(q, self.bound, VN(q), stop)
        self.name = "AutoLocalGaussian"
        self.entered = self._sites()  # with which the pass began that led to where q(g) is

    def begin(self) -> None:
        """Visit all members once, unless an earlier run has."""
        if self.resumed:
            return
        self.show("first visits")
        for index, _ in self.bound.batches:
            self.visits.visit(index, 1.0, first=True)
        self.show("")
        self.visits.sites.sum_up()
        top = self.visits.sites.top()
        self.q.restore(Coordinates(top.mean, top.root))

    def advance(self) -> Standing:
        """A pass, after a step of q(g) but for the first time."""
        if self._members is None:
            self.entered = self._sites()
        return super().advance()

    def _take_step(self) -> None:
        """A step, and the pass that decides whether it is kept; the members go back with q(g)."""
        before = self._sites()
        super()._take_step()
        assert self.optimizer.last is not None
        if bool(self.optimizer.last.accepted):
            self.entered = before
        else:
            self._put(before)

    def _norm(self, status: Status) -> tuple[Tensor, Tensor]:
        """Over all coordinates: with what the members have left."""
        norm, alive = super()._norm(status)
        return (norm.square() + self.bound.left**2).sqrt(), alive

    def ending(self, stop: Stop | None, last: Standing) -> Ending:
        """Say how far from the best q is on draws that no pass has seen."""
        ending = super().ending(stop, last)
        self.visits.sites.come_to(self._top())
        self.show("fresh draws")
        judged = fresh_elbo(self.visits, self._top(), self.bound.batches)
        self.show("")
        if not math.isfinite(judged.elbo):
            reason = f"because {judged}: no Gaussian fits inside the support. Transform the constrained coordinates."
            return ending._replace(converged=False, reason=reason, loss=-judged.elbo, members=torch.tensor(False))
        ending = ending._replace(loss=-judged.elbo)
        if last.stalled >= _STALL:
            reason = (
                f"because {last.stalled} steps in a row were rejected ({last.at()}): on the draws of the run "
                "the bound and its derivatives agree no further. Use more num_particles, or a larger tolerance."
            )
            return ending._replace(reason=f"{reason} On{str(judged)[2:]}.")
        if not ending.converged:
            return ending._replace(reason=f"{ending.reason.rstrip('.')}; {judged}.")
        norm = self.bound.norm_at(self._top())
        above = 0.5 * norm**2
        reason = (
            f"{ending.reason.rstrip('.')}; {judged}, and the norm is {norm:.2g}, which puts q about {above:.2g} nats "
            f"from the best, {1e3 * above / self.bound.members:.2g} a thousand members."
        )
        return ending._replace(reason=reason, norm=norm)

    def interrupted(self, reason: str, last: Standing) -> Ending:
        """As of every engine, with the sites in agreement with q(g)."""
        self.visits.sites.come_to(self._top())
        return super().interrupted(reason, last)

    def _top(self) -> Globals:
        assert isinstance(self.q, PrecisionCholeskyGaussian)
        return Globals(self.q.mean.detach().clone(), self.q.precision_tril.detach().clone())

    def _sites(self) -> dict[str, Any]:
        state = {name: value.clone() for name, value in self.visits.sites.state_dict().items()}
        return {**state, "left": self.bound.left, "gradient": self.bound.gradient}

    def _put(self, state: dict[str, Any]) -> None:
        self.bound.left, self.bound.gradient = state["left"], state["gradient"]
        self.visits.sites.load_state_dict({k: v for k, v in state.items() if k not in ("left", "gradient")})

    def here(self) -> Any:
        """Both parts of q."""
        return self.q.snapshot(), self._sites()

    @torch.no_grad()
    def go_back(self, coordinates: Any) -> None:
        """Put both parts of q where `here` was called."""
        self.q.restore(coordinates[0])
        self._put(coordinates[1])

    def settings(self) -> dict[str, str]:
        """The problem, with the sizes of plate and subsample."""
        layout = self.visits.density.layout
        sizes = f"{layout.plate}: {layout.members} of {layout.size}, {self.visits.num_particles} particles"
        return {**super().settings(), "plate": sizes}

    def state_dict(self) -> dict[str, Any]:
        """Return the state before the last pass, which a resumed run makes again."""
        batches = [torch.stack([index, new.long()]) for index, new in self.bound.batches]
        return {**super().state_dict(), "sites": self.entered, "seed": self.bound.seed, "batches": batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state that `state_dict` gave."""
        super().load_state_dict(state)
        self.bound.seed = state["seed"]
        self.bound.batches = [(both[0].clone(), both[1].bool()) for both in state["batches"]]
        self.entered = copied(state["sites"])
        self._put(self.entered)


def fit_locals(call: Call, guide: AutoLocalGaussian, options: dict[str, Any]) -> FitResult:
    """Fit a guide with memoised locals, in place: what `fit_guide` does with one."""
    unknown = sorted(set(options) - set(_KNOWN))
    if unknown:
        raise InputError(
            f"of the options of fit_guide an AutoLocalGaussian knows {', '.join(_KNOWN)}; got {', '.join(unknown)}."
        )
    visits = guide.visits(*call)
    layout = visits.density.layout
    dim = layout.size * layout.r + layout.P
    tolerance = options.get("tolerance")
    tolerance = 0.1 * math.sqrt(max(dim, 100) / 100) if tolerance is None else tolerance
    stop: Criterion = NormBelow(tolerance) | Evaluations(options.get("max_evaluations", _PASSES)) | Stalled(_STALL)
    if options.get("max_seconds") is not None:
        stop = stop | Seconds(options["max_seconds"])
    stop = joined(stop, options.get("stop"))
    return Loop(
        PassesOverPlate(guide.posterior, visits, stop, bool(guide.memo.visited.all())),
        stop,
        callbacks=checked_callbacks(options.get("callbacks", ())),
        progress=options.get("progress", True),
        checkpoint=options.get("checkpoint"),
        every=1,
    ).run()
