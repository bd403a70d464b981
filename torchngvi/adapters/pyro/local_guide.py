"""A guide for Pyro models whose plate of local latents is too large to be run at once.

    q(g, b) = N(g; m, V) Π_i N(b_i; c_i - K_iᵀg, S_i⁻¹)

For a model whose terms are log p(g) + Σ_i log p(y_i, b_i | g) a Gaussian with the precision in this arrow loses nothing
against a full covariance: where q is the best Gaussian, its precision is E_q[∇²ℓ], which has zeros between members.
"""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any, Self

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.distributions.util import sum_rightmost
from pyro.infer.autoguide import AutoGuide
from pyro.infer.autoguide.initialization import InitMessenger, init_to_median
from torch import Tensor

from torchngvi.adapters.pyro.local_bound import batches_of
from torchngvi.adapters.pyro.local_density import PlateDensity
from torchngvi.adapters.pyro.local_elbo import FreshElbo, fresh_elbo
from torchngvi.adapters.pyro.local_layout import PlateLayout
from torchngvi.adapters.pyro.local_sites import Globals, Sites
from torchngvi.adapters.pyro.local_steps import Visits
from torchngvi.adapters.pyro.starting import start
from torchngvi.arguments import read_callable, read_instance, read_number, read_shares, read_size
from torchngvi.errors import InputError
from torchngvi.numerics import small_blocks
from torchngvi.posteriors import PrecisionCholeskyGaussian


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

        Args:
            args, kwargs: of the model.

        Returns:
            The guide.

        Raises:
            InputError: as `PlateLayout`; too few particles.
        """
        if self.prototype_trace is None:
            started = InitMessenger(partial(start, self._init_loc_fn))(self.model)
            with torch.inference_mode(False), torch.no_grad(), pyro.validation_enabled(False):
                trace = poutine.block(poutine.trace(started).get_trace)(*args, **kwargs)
                layout = PlateLayout(trace, self.plate)
                if self.num_particles % 2 or self.num_particles < 2 * (layout.r + 1):
                    raise InputError(
                        f"num_particles is even and at least 2 (r + 1) = {2 * (layout.r + 1)}, for draws of a member's "
                        f"{layout.r} latents with the covariance I; got {self.num_particles}."
                    )
                for name in ("_INPUT", "_RETURN"):
                    trace.remove_node(name)
                self.layout, self._start = layout, layout.start(trace)
                self._prototype_frames = {
                    f.name: f for s in layout.sites for f in trace.nodes[s.name]["cond_indep_stack"]
                }
                self._frames = {s.name: trace.nodes[s.name]["cond_indep_stack"] for s in layout.sites}
                self.prototype_trace = trace
                self.memo = Sites(layout.size, self._start, self.init_scale)
                g = self._start[1]
                self.q = PrecisionCholeskyGaussian(
                    layout.P, mean=g, scale=self.init_scale, dtype=g.dtype, device=g.device
                )
        return self

    @property
    def posterior(self) -> PrecisionCholeskyGaussian:
        """The posterior q(g) of the globals, in unconstrained space, (P,).

        Raises:
            InputError: a guide that was not set up.
        """
        if self.prototype_trace is None:
            raise InputError("the guide has no posterior before it has seen the model: call guide.setup(*args) first.")
        assert isinstance(self.q, PrecisionCholeskyGaussian)
        return self.q

    def visits(self, model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Visits:
        """The sites of the guide with the terms of a model, by which it is fitted.

        Args:
            model: the model of the guide, or one with the same latents.
            args, kwargs: of the model.

        Returns:
            What visits members by their index, a batch at a time.

        Raises:
            InputError: as `setup` and `PlateDensity`.
        """
        self.setup(*args, **kwargs)
        with torch.inference_mode(False):
            density = PlateDensity(model, args, kwargs, self.layout, self._start)
        return Visits(self._memo(), density, self.num_particles)

    def elbo(self, *args: Any, **kwargs: Any) -> FreshElbo:
        """Estimate the ELBO over all members in nats, without bias, by one pass on new draws.

        Args:
            args, kwargs: of the model.

        Returns:
            The estimate ``elbo`` and its standard ``error``.

        Raises:
            InputError: as `visits`.
        """
        visits = self.visits(self.model, args, kwargs)
        return fresh_elbo(visits, self._top(), batches_of(visits))

    def _memo(self) -> Sites:
        assert isinstance(self.memo, Sites)
        return self.memo

    def _top(self) -> Globals:
        q = self.posterior
        return Globals(q.mean.detach(), q.precision_tril.detach())

    # -------------------------------------------------------------------------------- as a guide of Pyro

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Draw the globals, and the locals of a subsample of the plate given them; the values of the sites by name."""
        self.setup(*args, **kwargs)
        top, memo, layout = self._top(), self._memo(), self.layout
        plates = self._create_plates(*args, **kwargs)
        name = self._pyro_name
        g = pyro.sample(
            f"_{name}_globals",
            dist.MultivariateNormal(top.mean, precision_matrix=top.root @ top.root.mT),
            infer={"is_auxiliary": True},
        )
        with plates[self.plate] as index:
            shape = (len(index), *(1,) * (-layout.dim - 1))
            kept = (x[index].reshape(*shape, *x.shape[1:]) for x in (memo.centre, memo.slope, memo.precision))
            c, K, S = kept
            given = dist.MultivariateNormal(c - (g[..., None, :] @ K)[..., 0, :], precision_matrix=S)
            b = pyro.sample(f"_{name}_locals", given, infer={"is_auxiliary": True})
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
        """The quantiles of each latent, of the locals for all members of the plate.

        Args:
            quantiles: between 0 and 1.
            args, kwargs: not read; guides of Pyro take the arguments of the model.

        Returns:
            For each site one value a quantile, (quantiles, *shape), the plate at its full size.
        """
        top, memo = self._top(), self._memo()
        root, _ = small_blocks.cholesky(memo.precision)
        own = small_blocks.inverse(root).square().sum(-2)
        across = torch.linalg.solve_triangular(top.root, memo.slope, upper=False).square().sum(-2)
        mean = memo.centre - top.mean @ memo.slope
        z = torch.special.ndtri(
            torch.as_tensor(read_shares("quantiles", quantiles), dtype=mean.dtype, device=mean.device)
        )
        b = mean + z[:, None, None] * (own + across).sqrt()
        g = top.mean + z[:, None] * torch.cholesky_inverse(top.root).diagonal().sqrt()
        return {site.name: site.transform(self.layout.free(site, b, g)) for site in self.layout.sites}

    def median(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """The median of each latent, of the locals for all members of the plate.

        Args:
            args, kwargs: not read.

        Returns:
            The values by the name of the site.
        """
        return {name: value[0] for name, value in self.quantiles([0.5]).items()}
