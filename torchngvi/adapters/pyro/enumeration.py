"""Discrete sites that are marked for parallel enumeration: how they are summed out, for one θ and for many."""

import functools
import string
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from pyro.ops import packed
from pyro.ops.contract import contract_to_tensor
from pyro.poutine.enum_messenger import EnumMessenger
from pyro.poutine.trace_struct import Trace
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from torchngvi.adapters.pyro.sites import is_enumerated, random_sites
from torchngvi.errors import InputError


class Enumerated(EnumMessenger):
    """Pyro's messenger of parallel enumeration, without reading the ``data`` of a value, which vmap forbids."""

    def _pyro_post_sample(self, msg: Any) -> None:
        if site_is_subsample(msg) or msg["value"] is None:
            return
        value, dims = msg["value"], msg["infer"].setdefault("_dim_to_id", {})
        shape = value.shape[: value.ndim - msg["fn"].event_dim]
        dims.update(self._param_dims.get(msg["name"], {}))
        self._value_dims[msg["name"]] = {d: i for d, i in dims.items() if len(shape) >= -d and shape[d] > 1}


class Factor(NamedTuple):
    """The log probability of one site, or of one site for all draws."""

    plates: frozenset[str]
    dims: str  # a letter for each of its dimensions
    log_prob: Tensor


@dataclass
class Factors:
    """A trace with enumerated sites as a product of factors, the letters of the dimensions to sum out, and
    their scale.
    """

    factors: list[Factor]
    summed: frozenset[str]
    scale: Any

    @classmethod
    def of(cls, trace: Trace) -> Self:
        """The factors of a trace."""
        trace.pack_tensors()
        summed = frozenset(trace.symbol_to_dim) - set(trace.plate_to_symbol.values())
        factors, scales = [], []
        for site in random_sites(trace):
            parts: Any = site["packed"]
            log_prob = parts["log_prob"]
            if not summed.isdisjoint(log_prob._pyro_dims):
                scales.append(site["scale"])
                mask = None if is_enumerated(site) else parts["mask"]
                log_prob = packed.scale_and_mask(parts["unscaled_log_prob"], mask=mask)
            frames = [frame for frame in site["cond_indep_stack"] if frame.vectorized]
            plates = frozenset(trace.plate_to_symbol[frame.name] for frame in frames)
            factors.append(Factor(plates, log_prob._pyro_dims, log_prob))
        return cls(_of_one_dtype(factors), summed, _common(scales))

    def for_all_draws(self, log_probs: list[Tensor]) -> Tensor:
        """The sum for each draw, where the draws are in front of the log probabilities and count as one more plate."""
        known = "".join(factor.dims for factor in self.factors)
        draw = next(letter for letter in string.ascii_letters if letter not in known)
        factors = []
        for (plates, dims, _), log_prob in zip(self.factors, log_probs, strict=True):
            log_prob._pyro_dims = draw + dims  # type: ignore[attr-defined]
            factors.append(Factor(plates | {draw}, draw + dims, log_prob))
        return Factors(factors, self.summed, self.scale).sum_out(frozenset(draw))

    def sum_out(self, draws: frozenset[str]) -> Tensor:
        """Sum out the enumerated dimensions, and add up over plates but that of the draws."""
        inside: OrderedDict[frozenset, list[Tensor]] = OrderedDict()
        outside: OrderedDict[frozenset, list[Tensor]] = OrderedDict()
        for plates, dims, log_prob in self.factors:
            (outside if self.summed.isdisjoint(dims) else inside).setdefault(plates, []).append(log_prob)
        total = contract_to_tensor(outside, set(), target_ordinal=draws) if outside else 0.0
        if not inside:
            return torch.as_tensor(total)
        return self.scale * contract_to_tensor(inside, set(self.summed), target_ordinal=draws) + total


def _of_one_dtype(factors: list[Factor]) -> list[Factor]:
    """The factors in their widest dtype; Pyro gives the density of a Delta in the default one, whatever its value."""
    dtype = functools.reduce(torch.promote_types, (factor.log_prob.dtype for factor in factors))
    cast = [factor._replace(log_prob=factor.log_prob.to(dtype)) for factor in factors]
    for factor in cast:
        factor.log_prob._pyro_dims = factor.dims  # type: ignore[attr-defined]
    return cast


def _common(scales: list[Any]) -> Any:
    """The one scale of all sites that hang together with enumerated ones."""
    if any(isinstance(scale, Tensor) and scale.ndim for scale in scales) or len({float(scale) for scale in scales}) > 1:
        raise InputError(
            "all sites that depend on an enumerated one must have the same scale, one number, since it multiplies the "
            "log of their sum: subsample them by the same plate, or give poutine.scale to all of them."
        )
    return scales[0] if scales else 1.0  # where no enumerated site has more than one value
