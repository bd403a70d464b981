"""Whether the parts of a family of one's own agree with one another: its density, derivatives, mean and draws."""

import math
from typing import cast

import torch
from torch import Tensor
from torch.distributions import Transform, biject_to, constraints

from torchngvi.errors import InputError
from torchngvi.messages import listed
from torchngvi.tables.families import Family

_USUAL = {"trials": 7.0, "event": 1.0}  # what stands beside an outcome in a check
_DIFFERENCE, _SLOPE = 1e-5, 1e-6  # the step of central differences, and their error relative to 1 + |slope|
_ERRORS = 5.0  # standard errors of an average


def check_family(
    family: Family,
    y: tuple[Tensor, ...] | None = None,
    *,
    extra: tuple[float, ...] | None = None,
    draws: int = 20_000,
    seed: int = 0,
) -> None:
    """Check that the parts of a family agree with one another, before it is used; nothing is returned.

    Shapes broadcast; the density sums to 1 (integrates to 1 between the bounds); derivatives are those of finite
    differences, and finite to |η| = 40, and log densities numbers or -inf to |η| = 700; float32 stays float32; outcomes
    that are drawn are accepted, have `Family.mean` for their average, and 0 for that of the slopes of their log
    density; ``concave`` is true; `Family.log_jacobian` is that of `Family.natural`; starts and priors are as many as
    the parameters.

    Args:
        family: an object of your class.
        y: outcomes that it is settled with first, each (N,), where it needs some; by default it is taken as it is.
        extra: one value of each of `Family.extra`; by default 7 trials, and an event that was seen.
        draws: how many outcomes the average is taken over, which must be within five standard errors of the mean.
        seed: of the draws.

    Raises:
        InputError: what is wrong, the first that is found.

    >>> from torchngvi.tables.families import Held, NegativeBinomial, Poisson
    >>> check_family(Held(NegativeBinomial(), {"size": 2.0}))
    >>> class Wrong(Poisson):
    ...     def log_prob(self, eta, y, phi):
    ...         return y[0] * eta - eta.exp()
    >>> check_family(Wrong())
    Traceback (most recent call last):
    torchngvi.errors.InputError: log_prob of the poisson family is no log density: at η = -1.2 it sums to 1.059 in
    place of 1. Include every term that depends on y, η or φ.
    """
    if not isinstance(family, Family):
        raise InputError(f"a family is an object of a subclass of torchngvi.tables.families.Family; got {family!r}.")
    if family.nominal:
        raise InputError(
            f"check_family is for families of one linear predictor, and the {family.name} family has one for each "
            "category. Compare log_prob, jet, mean and draw with one another in a test of your own."
        )
    if y is not None:
        ones = torch.ones_like(y[0], dtype=torch.float64)
        family = family.settled(y, ones, 0 * ones)
    check = _Check(family, y, extra, draws, seed)
    parts = (check._shapes, check._sum, check._derivatives, check._mean, check._score, check._parameters, check._far)
    for part in parts:
        part()


class _Check:
    """The checks of a family, each of which raises a sentence."""

    def __init__(
        self, family: Family, given: tuple[Tensor, ...] | None, extra: tuple[float, ...] | None, draws: int, seed: int
    ) -> None:
        self.family, self.given, self.draws = family, given, draws
        self._attributes()
        unknown = [name for name in family.extra if name not in _USUAL]
        if extra is None and unknown:
            raise InputError(f"check_family needs extra=, a value of each of {listed(family.extra)}.")
        self.beside = tuple(_USUAL[name] for name in family.extra) if extra is None else tuple(map(float, extra))
        self.generator = torch.Generator().manual_seed(seed)
        self.eta = torch.linspace(-1.2, 1.2, 5, dtype=torch.float64, device="cpu")
        size = (3, len(family.parameters))
        self.phi = 0.3 * torch.randn(size, generator=self.generator, dtype=torch.float64, device="cpu")

    def _wrong(self, what: str, advice: str) -> InputError:
        return InputError(f"{what.replace('{}', f'the {self.family.name} family')} {advice}")

    def _attributes(self) -> None:
        family = self.family
        for name in ("name", "link", "discrete"):
            if not hasattr(family, name):
                raise InputError(f"the family {type(family).__name__} has no attribute {name!r}; give its class one.")
        if family.link not in ("identity", "log", "logit", "probit", ""):
            raise self._wrong(f"the link of {{}} is {family.link!r};", "choose identity, log, logit, probit, or ''.")
        if len(family.ways) != len(family.parameters) or set(family.ways) - {"log", "logit", "identity"}:
            raise self._wrong(
                f"{{}} has the parameters {family.parameters} and the scales {family.scales};",
                "give one of log, logit and identity for each parameter.",
            )

    def _call(self, method: str, *arguments: object) -> Tensor:
        """Call a method; what it raises becomes a sentence."""
        try:
            found = getattr(self.family, method)(*arguments)
        except Exception as error:
            flat = [part for one in arguments for part in (one if isinstance(one, tuple) else (one,))]
            shapes = listed([str(tuple(part.shape)) for part in flat if isinstance(part, Tensor)])
            said = f"{type(error).__name__} for tensors of the shapes {shapes}: {str(error).rstrip('.')}."
            raise self._wrong(
                f"{method} of {{}} raised {said}",
                "η is (N, *more), y broadcasts to it, and φ[..., j] broadcasts with it.",
            ) from error
        return cast(Tensor, found)

    def _expect(self, method: str, found: object, shape: tuple[int, ...]) -> None:
        got = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        if got != shape:
            raise self._wrong(
                f"{method} of {{}} returns {got}", f"where η and φ make {shape}; all is elementwise in η."
            )

    def _beside(self, like: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.full_like(like, value) for value in self.beside)

    def _shapes(self) -> None:
        """Draws, means and densities have the shape of η, and each entry depends on its own η and φ alone."""
        family, eta, phi = self.family, self.eta, self.phi
        beside = self._beside(eta)
        y = (self._call("draw", eta, phi[0], self.generator, beside), *beside)
        self._expect("draw", y[0], tuple(eta.shape))
        known = self._call("checked", y if self.given is None else self.given)
        if not isinstance(known, tuple) or len(known) != 1 + len(family.extra):
            raise self._wrong("checked of {} must return a tuple,", "the outcome and what stands beside it.")
        alone = [self._call("log_prob", eta, y, row) for row in phi]
        for more, wide in (((3,), phi), ((3, 2), phi[:, None])):
            ones = (1,) * len(more)
            at = eta.reshape(-1, *ones).expand(-1, *more)
            found = self._call("log_prob", at, tuple(part.reshape(-1, *ones) for part in y), wide)
            self._expect("log_prob", found, tuple(at.shape))
            apart = torch.stack(alone, 1).reshape(-1, 3, *ones[1:]).expand_as(found)
            if not torch.allclose(found, apart, rtol=1e-9, atol=1e-9):
                raise self._wrong(
                    f"log_prob of {{}} of a table {tuple(at.shape)} is not that of its columns;",
                    "take the coordinates as phi[..., 0], phi[..., 1], .. and let them broadcast.",
                )
            drawn = self._call("draw", at, wide, self.generator, tuple(part.reshape(-1, *ones) for part in beside))
            self._expect("draw", drawn, tuple(at.shape))
            kinds = () if family.outcomes is None else (len(family.outcomes),)
            self._expect("mean", self._call("mean", at, wide), (*at.shape, *kinds))

    def _sum(self, tolerance: float = 1e-4) -> None:
        """The density sums to 1."""
        for eta in self.eta[[0, 2, 4]]:
            total = float(self._counts(eta) if self.family.discrete else self._integral(eta))
            if not abs(total - 1) < tolerance:
                how = "sums" if self.family.discrete else "integrates"
                where = f"at η = {float(eta):.3g} it {how} to {total:.4g} in place of 1."
                raise self._wrong(
                    f"log_prob of {{}} is no log density: {where}", "Include every term that depends on y, η or φ."
                )

    def _density(self, eta: Tensor, y: Tensor) -> Tensor:
        return self._call("log_prob", eta.expand(y.shape), (y, *self._beside(y)), self.phi[0]).exp()

    def _counts(self, eta: Tensor, terms: int = 2_000) -> Tensor:
        low, high = self.family.bounds
        if "trials" in self.family.extra:
            high = self.beside[self.family.extra.index("trials")]
        first, last = (int(min(max(end, -terms), terms)) for end in (low, high))
        return self._density(eta, torch.arange(first, last + 1, dtype=torch.float64, device="cpu")).sum()

    def _integral(self, eta: Tensor, points: int = 20_001, end: float = 20.0) -> Tensor:
        """The trapezoid rule over the real line that the bounds are mapped to."""
        # points, end: of the trapezoid rule in t, y = centre + width · sinh t: tails to 10⁸ widths
        low, high = self.family.bounds
        at = eta.expand(1_001)
        line = _line(low, high)
        z = line.inv(self._call("draw", at, self.phi[0], self.generator, self._beside(at)))
        quarter, centre, last = torch.quantile(z, z.new_tensor([0.25, 0.5, 0.75]))
        t = torch.linspace(-end, end, points, dtype=torch.float64, device="cpu")
        x = centre + (last - quarter) * t.sinh()
        y = line(x)
        slope = line.log_abs_det_jacobian(x, y).exp() * (last - quarter) * t.cosh()
        inside = (y > low) & (y < high) & slope.isfinite()
        heights = self._density(eta, y[inside]) * slope[inside]
        return heights.sum() * (2 * end / (points - 1))

    def _derivatives(self) -> None:
        """Derivatives are finite, and those of differences; the curvature is not negative where that is said."""
        eta, phi, beside = self.eta[:, None].expand(-1, 3), self.phi, self._beside(self.eta[:, None])
        y = (self._call("draw", eta, phi, self.generator, tuple(b.expand_as(eta) for b in beside)), *beside)
        _, slope, curvature = self._call("jet", eta, y, phi)
        step = _DIFFERENCE
        up, down = (self._call("jet", eta + sign * step, y, phi) for sign in (1, -1))
        self._same("the slope in η", slope, (up[0] - down[0]) / (2 * step))
        self._same("the curvature in η", curvature, (up[1] - down[1]) / (2 * step))
        value = -self._call("log_prob", eta, y, phi)
        self._same("the value of jet", self._call("jet", eta, y, phi)[0], value)
        for j in range(phi.shape[-1]):
            at = phi.clone().requires_grad_()
            (found,) = torch.autograd.grad(self._call("log_prob", eta, y, at).sum(), at, materialize_grads=True)
            move = step * torch.eye(phi.shape[-1], dtype=phi.dtype, device="cpu")[j]
            ends = [self._call("log_prob", eta, y, phi + sign * move).sum(0) for sign in (1, -1)]
            self._same(f"the slope in φ[{j}]", found[:, j], (ends[0] - ends[1]) / (2 * step))
        if self.family.concave:
            wide = torch.linspace(-6, 6, 25, dtype=torch.float64, device="cpu")
            at = wide.reshape(-1, 1, 1).expand(-1, *y[0].shape)
            least = self._call("jet", at, y, phi)[2].min()
            if bool(least < -_SLOPE):
                raise self._wrong(
                    f"{{}} says that log_prob is concave in η, but its second derivative is {-float(least):.3g};",
                    "leave concave = False.",
                )

    def _far(self) -> None:
        """Far out value and derivatives are finite, further out there are densities, and float32 stays float32."""
        eta, beside = self.eta[:, None].expand(-1, 3), self._beside(self.eta[:, None])
        y = (self._call("draw", eta, self.phi, self.generator, tuple(b.expand_as(eta) for b in beside)), *beside)
        side, phi = eta.new_tensor([-1.0, 1.0])[:, None, None].expand(-1, *eta.shape), self.phi.clone().requires_grad_()
        at = (40 * side).requires_grad_()
        slopes = torch.autograd.grad(self._call("log_prob", at, y, phi).sum(), (at, phi), materialize_grads=True)
        if not all(bool(part.isfinite().all()) for part in (*slopes, *self._call("jet", 40 * side, y, self.phi))):
            raise self._wrong(
                "log_prob of {} or a derivative is not finite at |η| = 40;", "there e^η is 2e17 or 4e-18."
            )
        value = self._call("log_prob", 700 * side, y, self.phi)
        if bool(value.isnan().any()) or bool((value > (1e-12 if self.family.discrete else torch.inf)).any()):
            raise self._wrong("log_prob of {} at |η| = 700 is NaN or no probability;", "-inf is the least of use.")
        single = self._call("log_prob", eta.float(), tuple(part.float() for part in y), self.phi.float())
        if single.dtype != torch.float32:
            raise self._wrong(f"log_prob of {{}} of float32 is of {single.dtype};", "make constants by eta.new_tensor.")

    def _same(self, what: str, found: Tensor, expected: Tensor) -> None:
        if not bool(found.isfinite().all()):
            raise self._wrong(
                f"{what} of log_prob of {{}} is not finite;", "look for a torch.where one branch of which is."
            )
        error = ((found - expected).abs() / (1 + expected.abs())).max()
        if bool(error > _SLOPE):
            raise self._wrong(
                f"{what} of log_prob of {{}} differs from that of differences by {float(error):.2g} of its size;",
                "check jet, or whether log_prob leaves the graph of autograd.",
            )

    def _mean(self) -> None:
        """The average of what is drawn is the mean, within its Monte Carlo error."""
        family, eta = self.family, self.eta[:, None].expand(-1, self.draws)
        drawn = self._call("draw", eta, self.phi[0], self.generator, self._beside(eta))
        mean = self._call("mean", self.eta, self.phi[0])
        if "trials" in family.extra:
            drawn = drawn / self.beside[family.extra.index("trials")]
        if family.outcomes is not None:
            codes = torch.arange(len(family.outcomes), dtype=drawn.dtype, device="cpu")
            drawn = (drawn[..., None] == codes).to(drawn).movedim(1, -1)
        error = drawn.std(-1) / math.sqrt(self.draws)
        off = (drawn.mean(-1) - mean).abs() > _ERRORS * error + _DIFFERENCE
        if bool(off.any()):
            at = tuple(off.nonzero()[0].tolist())
            raise self._wrong(
                f"mean of {{}} at η = {float(self.eta[at[0]]):.3g} is {float(mean[at]):.4g}, but the average of "
                f"draws is {float(drawn.mean(-1)[at]):.4g} +- {float(error[at]):.2g};",
                "one of the two is wrong, or nan where there is no mean.",
            )

    def _score(self) -> None:
        """The average slope of the log density of draws is 0, as of draws from that density."""
        eta = self.eta[:, None].expand(-1, self.draws).clone().requires_grad_()
        phi = self.phi[0].expand(*eta.shape, -1).clone().requires_grad_()
        beside = self._beside(eta.detach())
        y = (self._call("draw", eta.detach(), phi.detach(), self.generator, beside), *beside)
        slopes = torch.autograd.grad(self._call("log_prob", eta, y, phi).sum(), (eta, phi), materialize_grads=True)
        table = torch.cat([slopes[0][..., None], slopes[1]], -1)
        average, error = table.mean(1), table.std(1) / math.sqrt(self.draws)
        off = (average.abs() > _ERRORS * error + _DIFFERENCE).nonzero()
        if len(off):
            at, j = off[0].tolist()
            what = f"φ[{j - 1}]" if j else "η"
            raise self._wrong(
                f"draw of {{}} does not draw from log_prob: at η = {float(self.eta[at]):.3g} the average slope in "
                f"{what} of what is drawn is {float(average[at, j]):.3g} +- {float(error[at, j]):.2g}, not 0;",
                "one of the two is wrong.",
            )

    def _parameters(self) -> None:
        """Natural values, their Jacobian, priors and the start are as many as the parameters."""
        family, phi, count = self.family, self.phi, len(self.family.parameters)
        natural = self._call("natural", phi)
        self._expect("natural", natural, (3, count))
        found = self._call("log_jacobian", phi)
        self._expect("log_jacobian", found, (3,))
        jacobian = torch.func.vmap(torch.func.jacrev(lambda row: family.natural(row[None])[0]))
        if count and not torch.allclose(found, jacobian(phi).slogdet()[1]):
            raise self._wrong("log_jacobian of {} is not the logarithm of |d natural/dφ|;", "override both or neither.")
        own = family.parameter_prior()
        if len(own) != count or not all(
            bool(one.log_prob(natural[:, j]).isfinite().all()) for j, one in enumerate(own)
        ):
            raise self._wrong(
                "parameter_prior of {} must be finite at natural values,", "one prior for each parameter."
            )
        eta = self.eta[:, None].expand(-1, 40).reshape(-1)
        y = (self._call("draw", eta, phi[0], self.generator, self._beside(eta)), *self._beside(eta))
        location, start = cast(tuple[float, Tensor], self._call("start", y, 0 * eta, torch.ones_like(eta)))
        if tuple(start.shape) != (count,) or not math.isfinite(location) or not bool(start.isfinite().all()):
            raise self._wrong("start of {} must be finite:", f"a number, and φ of the shape ({count},).")


def _line(low: float, high: float) -> Transform:
    """The map from the real line to the numbers between the bounds."""
    if math.isinf(low):
        return biject_to(constraints.real if math.isinf(high) else constraints.less_than(high))
    return biject_to(constraints.greater_than(low) if math.isinf(high) else constraints.interval(low, high))
