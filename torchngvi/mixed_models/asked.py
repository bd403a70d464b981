"""What a user asks of a mixed model, read and put into words: families, priors, ways to the posterior."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch import Tensor

from torchngvi.arguments import read_choice, read_seed
from torchngvi.errors import InputError
from torchngvi.messages import BINOMIAL, SHORT, full_name, hint
from torchngvi.mixed_models.integrated import Weighted
from torchngvi.models import Likelihood, MixedPrior
from torchngvi.models.learned import LEARNED, Learned
from torchngvi.models.likelihoods import FAMILIES
from torchngvi.models.mixed import RandomEffects
from torchngvi.models.multilevel_prior import prior_of

Marginalise = Literal["quadrature", "response", "none"]

WAYS = ("quadrature", "response", "none")
_SEEDS = 2**62
TELLING = 200  # coordinates up to which importance weights over all of them tell something of a few


def learned_of(family: str | Likelihood, prior: MixedPrior) -> Learned | None:
    """Find what is learned of a family, with the prior of its parameter.

    >>> learned_of("gaussian", MixedPrior()).name
    'residual sd'
    """
    name = full_name(family) if isinstance(family, str) else ""
    if name in LEARNED:
        return LEARNED[name](prior.likelihood)
    if isinstance(family, str) and name not in FAMILIES:
        names = ", ".join({**FAMILIES, **LEARNED})
        told = f" {BINOMIAL}" if name == "binomial" else hint(family, (*FAMILIES, *LEARNED, *SHORT))
        raise InputError(f"family must be one of {names}, or a Likelihood; got {family!r}.{told}")
    if prior.likelihood is not None:
        raise InputError(
            f"likelihood= of the prior is that of a learned parameter, of the families {', '.join(LEARNED)}; got "
            f"family={family if isinstance(family, str) else type(family).__name__}, which has none."
        )
    return None


def several(random: Any) -> bool:
    """Say whether random effects are of several grouping factors.

    >>> several(RandomEffects([[1.0]], [0])), several({"a": ([[1.0]], [0]), "b": ([[1.0]], [0])})
    (False, True)
    """
    return _by_factor(random) and len(random) > 1


def only(random: Any) -> Any:
    """The random effects of the only grouping factor."""
    if not _by_factor(random) or len(random) != 1:
        return random
    return next(iter(random.values())) if isinstance(random, Mapping) else random[0]


def prior_for(prior: MixedPrior, random: Any) -> MixedPrior:
    """The prior of the only grouping factor, of which a dict has the entry of its name; without one that is "group".

    >>> prior_for(MixedPrior(concentration={"a": 2.0}), {"a": ([[1.0]], [0])}).concentration
    2.0
    """
    if not any(isinstance(x, Mapping) for x in prior):
        return prior
    names = tuple(random) if isinstance(random, Mapping) else ("group",)
    return prior_of(prior, names[0], names) if names else prior


def _by_factor(random: Any) -> bool:
    if isinstance(random, Mapping):
        return True
    return isinstance(random, list | tuple) and bool(random) and all(isinstance(x, RandomEffects) for x in random)


def check_varies(y: Tensor) -> None:
    """Check that targets whose noise is to be learned differ."""
    if bool((y == y[0]).all()):
        raise InputError(
            f"every target is {float(y[0]):g}, of which no noise can be learned. Check y, or give the "
            "noise, family=GaussianNoise(1.0)."
        )


def check_way(way: object, others: Sequence[str] = WAYS) -> None:
    """Check the word for what is done with the random effects."""
    if way is not None:
        read_choice("marginalise", way, others, "must be quadrature, response or none")


def seed_of(seed: object) -> int:
    """The seed of all draws, after a check.

    >>> seed_of(3)
    3
    """
    return read_seed("seed", seed, "is that of all draws, a whole number such as 0, of less than 63 bits")


def numbers(size: int) -> tuple[str, ...]:
    """Names where none were given.

    >>> numbers(2)
    ('0', '1')
    """
    return tuple(str(k) for k in range(size))


def worth(weighted: Weighted, draws: int) -> str:
    """What weighted draws are worth."""
    return f"k-hat {weighted.k_hat:.2f}, {weighted.effective:.0f} of {draws} draws"


def unweighted(weighted: Weighted, clause: str, draws: int, dim: int) -> str:
    """How draws of a Gaussian over all coordinates were made, and what their weights would be where they are few.

    >>> few = Weighted(*2 * [Tensor()], 0.2, 90.0)
    >>> print(unweighted(few, "covariances of q", 100, 12))
    a Gaussian on all coordinates, random effects among them; covariances of q;
    its draws are not weighted: k-hat 0.20, 90 of 100 draws
    >>> print(unweighted(few, "covariances of q", 100, 1200))
    a Gaussian on all coordinates, random effects among them; covariances of q;
    its draws are not weighted, nor are the globals checked: weights over 1200 coordinates tell nothing of these
    """
    made = f"a Gaussian on all coordinates, random effects among them; {clause};\nits draws are not weighted"
    if dim > TELLING:
        return f"{made}, nor are the globals checked: weights over {dim} coordinates tell nothing of these"
    return f"{made}: {worth(weighted, draws)}"
