"""The posteriors, patterns and methods that have a name: the one list from which a user chooses by a word.

The command line and the tests read it.  Which method works with which posterior is not written down
here: it is asked of the parts themselves, by making the optimizer.
"""

import functools
import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from torchngvi.errors import InputError, PairError
from torchngvi.methods import (
    AIFVB,
    BWGD,
    IBLR,
    IFVB,
    NGVI,
    SRVN,
    VN,
    CovarianceGD,
    NewtonCG,
    ProximalBBVI,
    RootGD,
    Snngm,
    SVGDDensity,
    SymmetricSRVN,
)
from torchngvi.optim import NaturalGradientVI
from torchngvi.posteriors import CholeskyGaussian, DiagonalGaussian, NaturalGaussian, PrecisionCholeskyGaussian
from torchngvi.posteriors.flat import FlatCholesky, MeanFieldGaussian, VecGaussian, VechGaussian
from torchngvi.posteriors.flat.flat_gaussian import FlatGaussian
from torchngvi.posteriors.gaussian import Gaussian
from torchngvi.stepsizes import SufficientDecrease
from torchngvi.structures import Dense, Diagonal, Pattern, block_diagonal

POSTERIORS: dict[str, type[Gaussian]] = {
    "cholesky": CholeskyGaussian,
    "precision": PrecisionCholeskyGaussian,
    "natural": NaturalGaussian,
    "diagonal": DiagonalGaussian,
}
FLAT_POSTERIORS: dict[str, type[FlatGaussian]] = {
    "flat_cholesky": FlatCholesky,
    "mean_field": MeanFieldGaussian,
    "vec": VecGaussian,
    "vech": VechGaussian,
}
STRUCTURES: dict[str, Callable[[int], Pattern]] = {"full": Dense, "diagonal": Diagonal}
METHODS: dict[str, Callable[..., NaturalGradientVI]] = {
    "vn": VN,
    "srvn": SRVN,
    "symmetric_srvn": SymmetricSRVN,
    "newton_cg": NewtonCG,
    "iblr": IBLR,
    "ngvi": NGVI,
    "snngm": Snngm,
    "bwgd": BWGD,
    "svgd": SVGDDensity,
    "covariance_gd": CovarianceGD,
    "root_gd": RootGD,
    "proximal_bbvi": ProximalBBVI,
}
FLAT_METHODS: dict[str, Callable[..., NaturalGradientVI]] = {"ifvb": IFVB, "aifvb": AIFVB}
_SIZES = re.compile(r"[1-9][0-9]{0,8}(,[1-9][0-9]{0,8})+")


def posterior(
    name: str,
    dim: int,
    batch_shape: Sequence[int] = (),
    *,
    structure: str | None = None,
    **start: Any,  # mean, scale, dtype, device
) -> Gaussian | FlatGaussian:
    """The Gaussian posterior of that name over D coordinates."""
    flat = _chosen("posterior", name, {**POSTERIORS, **FLAT_POSTERIORS})
    if name in FLAT_POSTERIORS:
        if structure is not None:
            raise PairError(
                f"posterior {name} is a vector of parameters and takes no structure; got {structure!r}. Leave it out."
            )
        return flat.standard(dim, batch_shape, **start)
    kind = POSTERIORS[name]
    if structure is None:
        return kind(dim, batch_shape, **start)
    wanted = pattern(structure, dim)
    if _takes_structure(kind):
        return kind(dim, batch_shape, structure=wanted, **start)
    if (q := kind(dim, batch_shape, **start)).structure != wanted:
        others = ", ".join(other for other, made in POSTERIORS.items() if _takes_structure(made))
        raise PairError(
            f"posterior {name} has the structure {structure_of(name)} and no other; got {structure!r}. "
            f"Any structure is taken by: {others}."
        )
    return q


def pattern(
    structure: str,  # "full", "diagonal", or the sizes of blocks in the order of θ, as "1,4,2"
    dim: int,
) -> Pattern:
    """The covariance's pattern over D coordinates: every entry, the diagonal, or blocks independent of one another.

    >>> pattern("1,4,2", 7).parameters, pattern("full", 7).parameters  # 1 + 10 + 3, and 7·8/2
    (14, 28)
    """
    if structure in STRUCTURES:
        return STRUCTURES[structure](dim)
    sizes = _sizes(structure)
    if sum(sizes) != dim:
        raise InputError(
            f"the blocks of structure {structure} hold {sum(sizes)} coordinates, and there are {dim}. "
            "Give sizes that sum to them."
        )
    return block_diagonal(sizes)


@functools.cache
def structure_of(name: str) -> str:
    """The pattern of a posterior where none is asked for."""
    if name in FLAT_POSTERIORS:
        return "diagonal" if name == "mean_field" else "full"
    own = posterior(name, 2).structure
    return next(structure for structure, make in STRUCTURES.items() if make(2) == own)


def widths(
    structure: str,  # as for `pattern`
    dim: int,
) -> tuple[int, int]:
    """The size of the largest block of a pattern, and the entries of all blocks: the numbers behind memory and time."""
    if structure in STRUCTURES:  # the header of a file may claim more coordinates than a pattern can have
        return (1, dim) if STRUCTURES[structure] is Diagonal else (dim, dim**2)
    sizes = _sizes(structure)
    return max(sizes), sum(size**2 for size in sizes)


def _sizes(structure: str) -> list[int]:
    """Of blocks, in the order of θ."""
    if not _SIZES.fullmatch(structure):
        raise InputError(
            f"structure must be one of {', '.join(STRUCTURES)}, or the sizes of blocks such as 1,4,2; "
            f"got {structure!r}. An arrow or a forest has no name here: a --formula with groups has its own, and in "
            "Python a posterior takes structure=torchngvi.structures.arrow(groups=8, local=1, globals=2)."
        )
    return [int(size) for size in structure.split(",")]


def method(
    name: str,
    q: Gaussian | FlatGaussian,
    lr: float | Tensor | None = None,
    **settings: Any,  # estimator and others, as the method's class takes them
) -> NaturalGradientVI:
    """The optimizer of that name over q."""
    make = _chosen("method", name, {**METHODS, **FLAT_METHODS})
    if lr is not None:
        return make(q, lr, **settings)
    if name in FLAT_METHODS:
        return make(q, **settings)
    optimizer = make(q, **settings) if _has_default(make) else make(q, 1.0, **settings)
    own = not isinstance(optimizer.step_size, SufficientDecrease)  # it has a step size of its own
    if not (_has_default(make) and (optimizer.rule.natural or own)):
        raise InputError(
            f"method {name} needs a learning rate, in the scale of the problem and often below 1/(largest curvature): "
            "set lr, or use method vn, which needs none."
        )
    return optimizer


def check(method_name: str, posterior_name: str, structure: str | None = None, lr: float | None = None) -> None:
    """Check that a method, a posterior and a pattern fit together, before there are data."""
    dim = 2
    if structure is not None and structure not in STRUCTURES:  # few and small blocks stand for all
        small = sorted({min(size, 2) for size in _sizes(structure)}) * 2
        structure, dim = ",".join(map(str, small)), sum(small)
    q = posterior(posterior_name, dim, structure=structure)
    _chosen("method", method_name, {**METHODS, **FLAT_METHODS})
    flat = method_name in FLAT_METHODS
    if flat != (posterior_name in FLAT_POSTERIORS):
        raise PairError(
            f"method {method_name} does not move posterior {posterior_name}: it is for one of "
            f"{', '.join(FLAT_POSTERIORS if flat else POSTERIORS)}."
        )
    method(method_name, q, lr)


@functools.cache
def partners(name: str) -> tuple[str, ...]:
    """The posteriors that a method can move."""
    return tuple(other for other in (*POSTERIORS, *FLAT_POSTERIORS) if _fits(name, other))


@functools.cache
def needs_lr(name: str) -> bool:
    """Whether a method needs a learning rate, since its path does not start along the natural gradient."""
    try:
        check(name, partners(name)[0])
    except InputError:
        return True
    return False


@functools.cache
def by_trial(name: str) -> bool:
    """Whether a method without a learning rate finds its steps by trial, for which the values of L must be exact."""
    return not needs_lr(name) and method(name, posterior(partners(name)[0], 2)).step_size.needs_trial


def _fits(name: str, other: str) -> bool:
    try:
        check(name, other, lr=1.0)
    except PairError:
        return False
    return True


def _takes_structure(kind: type[Gaussian]) -> bool:
    return "structure" in inspect.signature(kind).parameters


def _has_default(make: Callable[..., Any]) -> bool:
    return inspect.signature(make).parameters["lr"].default is not inspect.Parameter.empty


def _chosen(what: str, name: str, known: dict[str, Any]) -> Any:
    if name not in known:
        raise InputError(f"{what} must be one of {', '.join(known)}; got {name!r}.")
    return known[name]
