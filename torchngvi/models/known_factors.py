"""Factors of a model: what they are asked for, and those whose expectation the user knows.

A factor sends each of its sites the message ∇_ω E_q log f, ω = E T of the site (Winn and Bishop 2005): what it adds to
the natural parameters.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

from torchngvi.arguments import read_callable, read_number
from torchngvi.errors import InputError
from torchngvi.interfaces import Posterior
from torchngvi.posteriors.natural_forms import natural_form
from torchngvi.posteriors.product import Product

_SEED = 20240407


class Factor(ABC):
    """One term of a log joint, over some sites of a product: abstract.

    Those to be used are `torchngvi.models.SiteFactor` and `ExpectedFactor`.

    Args:
        sites: the names of the sites that it reads.
        scale: the weight of the term, N/B for a batch of B out of N members.

    Raises:
        InputError: no site, a site twice, a scale that is not positive.

    >>> factor = ExpectedFactor(lambda omega: omega[..., 1], "rate")
    >>> isinstance(factor, Factor), factor.sites
    (True, ('rate',))
    """

    exact: bool = True  # whether its messages are, once it was prepared

    def __init__(self, sites: Sequence[str], scale: float = 1.0) -> None:
        if not sites or not all(isinstance(name, str) for name in sites) or len(set(sites)) < len(sites):
            raise InputError(f"a factor reads at least one site, each by its name and once; got {tuple(sites)}.")
        self.scale = read_number("scale", scale, "is the weight of a factor in the log joint", above=0)
        self.sites = tuple(sites)

    @abstractmethod
    def prepare(self, q: Product) -> int:
        """Make ready for messages at q: find out whether the factor is conjugate, or draw.

        Returns:
            How many values of the log factor were asked for.
        """

    def at(
        self,
        values: Mapping[str, Tensor],  # (S, *batch, d) by site
        q: Product,
    ) -> Tensor:  # (S,)
        """Compute log f at values of the sites, summed over all members, without the scale."""
        raise NotImplementedError  # asked of no ExpectedFactor

    @abstractmethod
    def value(
        self,
        omega: Mapping[str, Tensor],  # (*batch, p) by site
    ) -> Tensor:  # ()
        """Compute E_q log f, summed over all members, without the scale."""

    @abstractmethod
    def message(
        self,
        site: str,
        omega: Mapping[str, Tensor],  # (*batch, p) by site
    ) -> Tensor:  # (*batch, p)
        """Compute ∇_ω E_q log f for a site, which is what the factor adds to its natural parameters."""


@final
class ExpectedFactor(Factor):
    """A term whose expectation the user knows as a function of the expectation parameters ω = E T of its sites.

    One wants it for sums over latent classes or counts, which no table has: the bound with these summed out, such as
    Σ x log Σ_k exp(E log θ_k + E log β_k) of topics, whose gradient in ω is the sum of the expected counts.

    Args:
        function: v(ω_1, ω_2, ...), one argument (*batch, p) a site, summed over all members, differentiable.
        sites: the names of the sites, in the order of the arguments.
        scale: the weight of the term, N/B for a batch of B out of N members.

    Raises:
        InputError: something that cannot be called, as `Factor`.

    >>> factor = ExpectedFactor(lambda omega: 5 * omega[..., 0] + 2 * omega[..., 1], "rate")  # five events in time two
    >>> factor.message("rate", {"rate": torch.zeros(2)}).tolist()
    [5.0, 2.0]
    """

    def __init__(self, function: Callable[..., Tensor], *sites: str, scale: float = 1.0) -> None:
        super().__init__(sites, scale)
        read_callable("function", function, "is a function of expectation parameters")
        self.function = function

    @classmethod
    def prior(cls, law: Posterior, site: str, scale: float = 1.0) -> "ExpectedFactor":
        """Make the factor of a prior that is in the family of its site, the same for all members of the site.

        E log p = ⟨η + b, ω⟩ - A, with η of the prior and log h = ⟨b, T⟩.

        Args:
            law: the prior, one member without batch dimensions.
            site: the name of the site.
            scale: the weight of the term.

        Raises:
            InputError: a batch of priors.
            PairError: a posterior that is no exponential family, or a Gaussian with a structure.

        >>> from torchngvi.posteriors.flat import Gamma
        >>> factor = ExpectedFactor.prior(Gamma(torch.tensor([2.0, 3.0])), "rate")
        >>> factor.message("rate", {"rate": torch.zeros(5, 2)})[0].tolist()  # (2 - 1) log x - 3x
        [1.0, 3.0]
        """
        form = natural_form(law)
        if law.batch_shape:
            raise InputError(f"a prior is one law for all members of its site; got a batch {tuple(law.batch_shape)}.")
        density: Any = law.log_prob
        x = form.reference(1, torch.Generator().manual_seed(_SEED)).to(form.natural())[0]
        slope = (form.natural() + form.base()).detach().clone()
        constant = (density(x) - (slope * form.statistics(x)).sum()).detach()
        return cls(lambda omega: omega @ slope + constant, site, scale=scale)

    def prepare(self, q: Product) -> int:
        """Check that the product has the sites."""
        missing = [name for name in self.sites if name not in q.sites]
        if missing:
            raise InputError(f"a factor reads the sites {list(self.sites)}; the product lacks {missing}.")
        return 0

    def value(self, omega: Mapping[str, Tensor]) -> Tensor:
        """Call the function, and add up."""
        return self.function(*(omega[name] for name in self.sites)).sum()

    def message(self, site: str, omega: Mapping[str, Tensor]) -> Tensor:
        """Differentiate the function in ω of the site."""
        with torch.enable_grad():
            point = omega[site].detach().clone().requires_grad_()
            value = self.function(*(point if name == site else omega[name].detach() for name in self.sites)).sum()
            return torch.autograd.grad(value, point)[0]
