"""Products of posteriors: named sites that are independent of each other, each with a family of its own.

    q(x) = Π_sites Π_members q_site(x_site)

The members of a site are its batch: the batch shape of a site is the plates that it is in, aligned on the right, with 1
for a plate that it is not in, as Pyro has them.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self, final

import torch
from torch import Tensor

from torchngvi.arguments import read_instance
from torchngvi.errors import InputError, PairError
from torchngvi.interfaces import Coordinates, Posterior
from torchngvi.posteriors.flat.flat_posterior import FlatPosterior
from torchngvi.posteriors.gaussian import Gaussian
from torchngvi.posteriors.shapes import ProbedPosterior, Shape, refused
from torchngvi.structures.pattern import NoMatrix

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

    def log_prob(
        self,
        values: Mapping[str, Tensor],  # (*sample, *batch, d) by site
    ) -> Tensor:  # (*sample,)
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
