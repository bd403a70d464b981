"""Products of posteriors, and natural parameters, statistics and lengths of changes of their factors.

A site of a product is moved by adding up natural parameters, whatever its posterior stores.  Of a Gaussian

    T = (x, -½x_i², -x_i x_j for j < i)      η = (S m, vech S)      δᵀFδ = ∇mᵀS∇m + ½ tr(DVDV),  ∇m = V(u - Dm)

for a change δ = (u, vech D), so that η are what a `NaturalGaussian` stores; of a `DiagonalGaussian` without the mixed
products.  The base measure is constant.  The families are their own form.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self, final

import torch
from torch import Tensor

from torchngvi.arguments import read_instance
from torchngvi.errors import InputError, PairError
from torchngvi.interfaces import Coordinates, Posterior
from torchngvi.numerics.linalg import cholesky, dual_entries, lower_entries, symmetric_matrix
from torchngvi.posteriors.flat.exponential_family import (
    ExponentialFamily,
)
from torchngvi.posteriors.flat.flat_posterior import FlatPosterior
from torchngvi.posteriors.gaussian import Gaussian
from torchngvi.posteriors.shapes import ProbedPosterior, Shape, refused
from torchngvi.structures import Dense
from torchngvi.structures.pattern import NoMatrix


class NaturalForm:
    """A posterior by its natural parameters η, (*batch, p), here a family, which is its own form."""

    def __init__(self, q: Any) -> None:
        self.q, self.size = q, q.size

    def statistics(self, x: Tensor) -> Tensor:
        """Compute the sufficient statistics T(x), (*sample, *batch, p), of x, (*sample, *batch, d)."""
        return self.q.statistics(x)

    def base(self) -> Tensor:
        """Return b, (p,), with log h(x) = ⟨b, T(x)⟩ up to a constant."""
        return self.q.base_coefficients()

    def natural(self) -> Tensor:
        """Return η, (*batch, p)."""
        return self.q.vector

    def expectation(self) -> Tensor:
        """Compute ω = E T, (*batch, p)."""
        return self.q.expectation()

    def norm2(self, change: Tensor) -> Tensor:
        """Compute the squared Fisher length δᵀFδ of a change of η, (*batch,)."""
        return (change * self.q.fisher_product(change)).sum(-1).clamp_min(0.0)

    def put(self, eta: Tensor) -> Tensor:
        """Move the posterior to η, in place; False, and nothing done, where that is outside of the domain."""
        ok = self.q.in_domain(eta).all()
        if bool(ok):
            self.q.vector.copy_(eta)
        return ok

    def retracted(self, change: Tensor) -> Tensor:
        """Add a change to η, kept inside where the family knows how."""
        return self.q.retracted(self.q.vector, change)

    def reference(self, number: int, generator: torch.Generator) -> Tensor:
        """Draw points (n, d) in float64 on the CPU from a member around 0 or 1, wherever the posterior itself is."""
        return self.q.at(self.q.reference_vector().double().cpu()).sample(number, generator)


def natural_form(q: Posterior) -> NaturalForm:
    """View a posterior by its natural parameters."""
    if isinstance(q, ExponentialFamily):
        return NaturalForm(q)
    if isinstance(q, Gaussian) and (isinstance(q.structure, Dense) or q.structure.widest == 1):
        return _GaussianForm(q)
    raise PairError(
        "a site of a product is an exponential family of torchngvi.posteriors.flat, or a Gaussian with all "
        f"correlations or none; got {q!r}."
    )


class _GaussianForm(NaturalForm):
    """Mean and precision."""

    def __init__(self, q: Gaussian) -> None:
        self.q, self.alone = q, q.structure.widest == 1
        self.dim = q.dim
        self.size = 2 * q.dim if self.alone else q.dim + q.dim * (q.dim + 1) // 2

    def statistics(self, x: Tensor) -> Tensor:
        if self.alone:
            return torch.cat([x, -0.5 * x.square()], -1)
        return torch.cat([x, -0.5 * dual_entries(x[..., :, None] * x[..., None, :])], -1)

    def _parts(self, eta: Tensor) -> tuple[Tensor, Tensor]:
        """The vector, and the symmetric matrix or its diagonal."""
        vector, entries = eta[..., : self.dim], eta[..., self.dim :]
        if self.alone:
            return vector, entries
        return vector, symmetric_matrix(entries, self.dim)

    def base(self) -> Tensor:
        return torch.zeros(self.size, dtype=self.q.dtype, device=self.q.device)

    def natural(self) -> Tensor:
        mean = self.q.mean
        if self.alone:
            precision = self.q.variance.reciprocal()
            return torch.cat([precision * mean, precision], -1)
        precision = torch.cholesky_inverse(cholesky(self.q.covariance)[0])
        return torch.cat([(precision @ mean[..., None])[..., 0], lower_entries(precision)], -1)

    def expectation(self) -> Tensor:
        mean = self.q.mean
        if self.alone:
            return torch.cat([mean, -0.5 * (self.q.variance + mean.square())], -1)
        second = self.q.covariance + mean[..., :, None] * mean[..., None, :]
        return torch.cat([mean, -0.5 * dual_entries(second)], -1)

    def norm2(self, change: Tensor) -> Tensor:
        (vector, D), mean = self._parts(change), self.q.mean
        if self.alone:
            V = self.q.variance
            return ((vector - D * mean).square() * V + 0.5 * (D * V).square()).sum(-1)
        V = self.q.covariance
        force = vector - (D @ mean[..., None])[..., 0]
        product = D @ V
        turned = (product * product.mT).sum((-2, -1))  # tr(DVDV)
        return (force * (V @ force[..., None])[..., 0]).sum(-1) + 0.5 * turned

    def put(self, eta: Tensor) -> Tensor:
        vector, precision = self._parts(eta)
        if self.alone:
            ok = (precision > 0).all() & eta.isfinite().all()
            if bool(ok):
                self.q.initialize_(vector / precision, precision.rsqrt())
            return ok
        factor, positive = cholesky(precision)
        ok = positive.all() & vector.isfinite().all()
        if bool(ok):
            covariance = torch.cholesky_inverse(factor)
            mean = torch.cholesky_solve(vector[..., None], factor)[..., 0]
            self.q.initialize_(mean, cholesky(covariance)[0])
        return ok

    def retracted(self, change: Tensor) -> Tensor:
        return self.natural() + change

    def reference(self, number: int, generator: torch.Generator) -> Tensor:
        return torch.randn(number, self.dim, dtype=torch.float64, device=generator.device, generator=generator)


# ------------------------------------------------------------------------------------ products of posteriors


Values = dict[str, Tensor]
_REFUSAL = (
    "a Product has no mean vector and no root: its sites are moved one by one. Fit it by fit(q, FactorGraph(factors)), "
    "or step an optimizer over one site, q['name']."
)


@final
class Product(ProbedPosterior):
    """A product of named posteriors, whose log densities, divergences and entropies add up.

    Use it where the unknowns are of several kinds: shares, rates, precisions, means, classes.  It is fitted by
    `torchngvi.fit` to a `torchngvi.models.FactorGraph`.

    Args:
        sites: posteriors by name, all of one dtype: exponential families and Gaussians. The batch shape of each is
            the shape of its plates.

    Raises:
        InputError: no site, one that is no posterior, names that are no text or have a dot, several dtypes.

    >>> from torchngvi import CholeskyGaussian
    >>> from torchngvi.posteriors.flat import Gamma
    >>> q = Product(mu=CholeskyGaussian(1), tau=Gamma(torch.tensor([3.0, 2.0])))
    >>> q
    Product(mu=CholeskyGaussian(1, dtype=torch.float32), tau=Gamma(2))
    >>> {name: tuple(x.shape) for name, x in q.sample(5).items()}
    {'mu': (5, 1), 'tau': (5, 1)}
    """

    framed = False
    upper = False
    engine = "product"
    takes = frozenset()
    domain = "each site is inside its own"

    def __init__(self, sites: Mapping[str, Posterior] | None = None, /, **named: Posterior) -> None:
        super().__init__()
        what = "are posteriors by name, such as {'mu': CholeskyGaussian(1)}"
        given = {**({} if sites is None else read_instance("sites", sites, Mapping, what)), **named}
        if not given:
            raise InputError("a Product has at least one site: Product(mu=CholeskyGaussian(1), tau=Gamma(...)).")
        for name, q in given.items():
            if not isinstance(q, Gaussian | FlatPosterior):
                raise InputError(
                    f"a site of a Product is a Gaussian or a posterior of torchngvi.posteriors.flat; got "
                    f"{type(q).__name__} for {name!r}."
                )
            if not isinstance(name, str) or "." in name:
                raise InputError(f"the name of a site is a text without a dot; got {name!r}.")
        dtypes = {q.dtype for q in given.values()}
        if len(dtypes) > 1:
            raise InputError(f"the sites of a Product have one dtype; got {sorted(map(str, dtypes))}.")
        self.sites = torch.nn.ModuleDict(given)
        self.batch_shape = torch.Size()
        self.dim = sum(q.batch_shape.numel() * q.dim for q in given.values())
        self.structure = NoMatrix(0)
        like = next(iter(given.values())).mean_probe
        self._add_probes(like.new_zeros(0), like.new_zeros(0))

    # ------------------------------------------------------------------------ the sites

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the sites, in their order."""
        return tuple(self.sites)

    def __getitem__(self, name: str) -> Any:
        return self.sites[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.sites)

    def __len__(self) -> int:
        return len(self.sites)

    def extra_repr(self) -> str:
        """Describe the sites for ``repr``."""
        return ", ".join(f"{name}={_described(q)}" for name, q in self._items())

    def __repr__(self) -> str:
        return f"Product({self.extra_repr()})"

    def _items(self) -> list[tuple[str, Any]]:
        return list(self.sites.items())

    def _of(self, read: Callable[[Any], Tensor]) -> Values:
        return {name: read(q) for name, q in self._items()}

    @property
    def mean(self) -> Values:  # (*batch, d) by site
        """The means of the sites, by name."""
        return self._of(lambda q: q.mean)

    @property
    def variance(self) -> Values:
        """The variances of the sites, by name."""
        return self._of(lambda q: q.variance)

    @property
    def stddev(self) -> Values:
        """The standard deviations of the sites, by name."""
        return self._of(lambda q: q.stddev)

    # ------------------------------------------------------------------------ the distribution

    def sample(self, shape: Shape = (), generator: torch.Generator | None = None) -> Values:
        """Draw all sites.

        Args:
            shape: the shape of the sample, or a number of draws.
            generator: the source of the noise; torch's default generator if None.

        Returns:
            Draws by site, (*shape, *batch, d).
        """
        return self._of(lambda q: q.sample(shape, generator))

    def log_prob(self, values: Mapping[str, Tensor]) -> Tensor:
        """Compute log q(x), the sum over sites and members.

        Args:
            values: one value a site, (*sample, *batch, d).

        Returns:
            The log densities, (*sample,).

        Raises:
            InputError: values of other sites.
        """
        if set(values) != set(self.sites):
            raise InputError(f"log_prob takes a value for each of {list(self.sites)}; got {list(values)}.")
        parts = [_summed(q.log_prob(values[name]), q) for name, q in self._items()]
        return sum(parts[1:], parts[0])

    def entropy(self) -> Tensor:
        """Compute the entropy in nats, (), the sum over sites and members."""
        parts = [q.entropy().sum() for _, q in self._items()]
        return sum(parts[1:], parts[0])

    def kl(self, other: "Product") -> Tensor:
        """Compute KL(q‖q') in nats, (), the sum over sites and members.

        Args:
            other: q', with the same sites of the same families.

        Returns:
            The divergence.

        Raises:
            PairError: other sites, or another family at a site.
        """
        if not isinstance(other, Product) or set(other.sites) != set(self.sites):
            got = list(other.sites) if isinstance(other, Product) else type(other).__name__
            raise PairError(f"the divergence is between products of the same sites; got {list(self.sites)} and {got}.")
        parts = [q.kl(other.sites[name]).sum() for name, q in self._items()]
        return sum(parts[1:], parts[0])

    # ------------------------------------------------------------------------ as every posterior

    def snapshot(self) -> Any:
        """Copy the coordinates of each site, for `restore`."""
        return {name: q.snapshot() for name, q in self._items()}

    def restore(self, coordinates: Any) -> None:
        """Write the coordinates of each site in place."""
        for name, q in self._items():
            q.restore(coordinates[name])

    def drop_gradients(self) -> None:
        """Empty the gradients of the probes of each site."""
        for _, q in self._items():
            q.drop_gradients()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        for q in self.sites.values():
            q._apply(fn)
        return super()._apply(fn, recurse)

    @property
    def coordinates(self) -> Coordinates:
        """Refuse; each site has its own."""
        raise PairError(_REFUSAL)

    frame, probed, unframe, tangent, moved = refused(_REFUSAL, "frame", "probed", "unframe", "tangent", "moved")


def _summed(log_prob: Tensor, q: Posterior) -> Tensor:
    """The sum over the members of a site."""
    return log_prob.flatten(log_prob.ndim - len(q.batch_shape)).sum(-1) if q.batch_shape else log_prob


def _described(q: Any) -> str:
    if isinstance(q, FlatPosterior):
        batch = f", batch_shape={tuple(q.batch_shape)}" if q.batch_shape else ""
        return f"{type(q).__name__}({q.size}{batch})"
    return repr(q)
