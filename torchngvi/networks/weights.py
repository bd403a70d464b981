"""The weights of a network as an optimizer meets them: a mean and a covariance, of which the parameters hold a draw.

The parameters of the network hold a draw θ in training, once an optimizer is attached, and the mean m in evaluation
and in `state_dict()`.  Hooks on the modules of the network see to it, so that no line of a training loop has to.
"""

import copy
import functools
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from torchngvi.arguments import read_count, read_number, read_seed
from torchngvi.distributed import average_over_ranks_, same_on_ranks_
from torchngvi.errors import InputError
from torchngvi.networks.families import Delta, Family, all_finite, seed_of, zero_where_
from torchngvi.networks.layout import (
    PriorPrecision,
    Structure,
    families,
    find_units,
    is_last_linear,
    measure_units,
    unwrapped,
)
from torchngvi.networks.likelihoods import OutputLikelihood, read_likelihood

NUM_DATA = "is the number of labels in the training data"
TEMPERATURE = 0.05  # chosen on validation data of four tasks, docs/appendix/network_measurements.md has other numbers
_LAST = 4  # the running curvature is a mean over the last fourth of the observations, about
_PASSED_OVER = (__name__.rpartition(".")[0], "torch.", "contextlib", "functools")  # frames that no caller wrote


def frames() -> Iterator[FrameType]:
    """Iterate over the frames of the callers, the innermost first."""
    frame = sys._getframe().f_back
    while frame is not None:
        yield frame
        frame = frame.f_back


def warn_caller(sentence: str) -> None:
    """Warn at the line of the script that led here, through whatever frames of torch and of this package."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_PASSED_OVER):
        level, frame = level + 1, frame.f_back
    warnings.warn(sentence, stacklevel=level)


class NetworkWeights(nn.Module):
    """The families, the draw and the observed curvature of a network's posterior.

    Args:
        model, num_data, structure, prior_precision, temperature, likelihood, seed, prior, prior_weight: as in
            :func:`torchngvi.network`.

    Attributes:
        names: of the parameters that q is over.
        parameters_of_network: they themselves, in the same order.
        units, scales: of each layer, and their norms at the start, ν, by which a step is limited.
    """

    def __init__(
        self,
        model: nn.Module,
        num_data: int,
        structure: Structure = "diagonal",
        prior_precision: PriorPrecision = 1.0,
        temperature: float = TEMPERATURE,
        likelihood: str | OutputLikelihood = "categorical",
        seed: int = 0,
        prior: "NetworkWeights | Mapping[str, Tensor] | None" = None,
        prior_weight: float = 1.0,
    ) -> None:
        super().__init__()
        self.likelihood = read_likelihood(likelihood)
        self.num_data = read_count("num_data", num_data, NUM_DATA)
        self.seed = read_seed("seed", seed, "is an integer of less than 63 bits, the same in all processes")
        self.temperature = read_number("temperature", temperature, at_least=0)
        self._model = [unwrapped(model)]  # in a list, so that it is not a part of q
        if posterior_of(self.model) is not None:
            raise InputError("The network has a posterior already; use it, or take it away with its release().")
        centers, precisions = _read_prior(prior, prior_weight)
        self.families = families(self.model, self.num_data, structure, prior_precision, centers, precisions)
        self.names = [name for family in self.each() for name in family.names]
        self.parameters_of_network = [p for family in self.each() for p in family.parameters_of_network]
        places = {p: place for place, p in enumerate(self.parameters_of_network)}
        self.units, self.layers = find_units(self.model, places)
        self.linear = is_last_linear(self.model, places)
        self._unit_of = {place: unit for unit in self.units for place in unit.places}
        self.scales = measure_units(self.units, list(self.mean.values()))
        self.draw, self.observed = 0, 0  # the number of the present draw, and of observations of the curvature
        self.structure = structure
        self.detach: Callable[[], None] | None = None  # lets the optimizers go
        self.ending: Callable[[], str | None] | None = None  # what to say of a training that may have ended too early
        self._seen: list[tuple[Family, list[Tensor | None], float | Tensor]] = []  # what waits for the step
        self.unfinished: Callable[[], None] | None = None  # ends a step that one of several optimizers left out
        self.sampling, self.pinned, self.holds_draw = False, False, False
        self.written = Written()
        self._hooks = Hooks(self)
        self.register_load_state_dict_pre_hook(_before_loading)
        self.register_load_state_dict_post_hook(_after_loading)

    @property
    def model(self) -> nn.Module:
        """The network."""
        return self._model[0]

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters by name, but for those that are frozen."""
        each = zip(self.names, self.parameters_of_network, strict=True)
        return {name: p for name, p in each if p.requires_grad}

    @property
    def mean(self) -> dict[str, Tensor]:
        """The means by name; the network's own parameters hold them in evaluation."""
        return self._named([family.mean for family in self.each()])

    @property
    def variance(self) -> dict[str, Tensor]:
        """The marginal variances by name."""
        return self._named([list(torch._foreach_mul(f.variances(), self.temperature)) for f in self.each()])

    @property
    def prior(self) -> dict[str, Delta]:
        """The precision of the prior a datum, δ = λ/N, by name."""
        return dict(zip(self.names, (delta for family in self.each() for delta in family.prior), strict=True))

    def each(self) -> Iterator[Family]:
        """Iterate over the families."""
        return iter(self.families)  # type: ignore[arg-type]

    def _named(self, lists: list[list[Tensor]]) -> dict[str, Tensor]:
        return dict(zip(self.names, (tensor for part in lists for tensor in part), strict=True))

    @torch.no_grad()
    def mean_(self) -> None:
        """Write the mean into the parameters of the network, where they hold a draw."""
        if not self.holds_draw:
            return
        self.written.note(self.sampling and not self.pinned)
        for family in self.each():
            family.follow_()
            family.mean_()
        torch.clear_autocast_cache()  # of what the parameters held
        self.holds_draw = False

    @torch.no_grad()
    def add_prior_(self, gradients: Mapping[str, Tensor], at: Mapping[str, Tensor]) -> None:
        """Add the prior's part δ(θ - m₀) at weights θ to gradients of the mean loss, by name, in place."""
        for family in self.each():
            family.add_prior_(gradients, [at[name] for name in family.names])

    def draw_(self) -> None:
        """Write the present draw into the parameters of the network; it is the same until the next step."""
        self._write_(self.seed, self.draw)

    @torch.no_grad()
    def _write_(self, seed: int, draw: int) -> None:
        """Write a draw into the parameters."""
        self.written.note(self.holds_draw and self.sampling and not self.pinned)
        for family in self.each():
            family.follow_()
            if not self.holds_draw:
                family.adopt_()
            family.draw_(seed, draw, self.temperature**0.5)
        torch.clear_autocast_cache()
        self.holds_draw = True

    @torch.compiler.disable
    def finish_step(self) -> None:
        """End the step that is under way, if one of several optimizers has not stepped."""
        if self.unfinished is not None:
            self.unfinished()

    @torch.no_grad()
    def agree_(self) -> None:
        """Take the mean of the first process in all processes that train together."""
        self.mean_()
        for family in self.each():
            family.follow_()
            family.adopt_()
            same_on_ranks_(family.mean)
            family.mean_()
        if self.draw == 0:  # weights may have been loaded since q was made
            self.scales = measure_units(self.units, list(self.mean.values()))
        scales = torch.tensor(self.scales, device=self.parameters_of_network[0].device)
        same_on_ranks_([scales])
        self.scales = scales.tolist()

    @torch.compiler.disable
    def _switch(self, wanted: bool) -> None:
        """Write the draw or the mean, out of sight of a compiler."""
        with torch.no_grad():
            self.draw_() if wanted else self.mean_()

    def settle(self, training: bool) -> None:
        """Let the parameters hold a draw in training and the mean in evaluation; called before every forward pass."""
        if self.unfinished is not None:
            self.finish_step()
        wanted = training and self.sampling
        if not self.pinned and wanted != self.holds_draw:
            self._switch(wanted)

    @contextmanager
    def at_mean(self) -> Iterator[None]:
        """Hold the mean in the parameters, whatever the mode of the network, until the block ends."""
        with self._pinned_after(self.mean_):
            yield

    @contextmanager
    def drawn(self, number: int) -> Iterator[None]:
        """Hold a draw for predictions in the parameters until the block ends; those of the training stay untouched."""
        refuse_replaced(self.model, self.names, self.parameters_of_network)
        with self._pinned_after(functools.partial(self._write_, seed_of(self.seed, 0, "predictions"), number)):
            yield

    @contextmanager
    def _pinned_after(self, write: Callable[[], None]) -> Iterator[None]:
        """Hold what a function writes, whatever the mode of the network, until the block ends."""
        self.finish_step()
        before = self.pinned
        write()
        self.pinned = True
        try:
            yield
        finally:
            self.mean_()
            self.pinned = before
            self.settle(self.model.training)

    def take_moves_(self) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """Return how far the parameters are from the mean, the sums of squares in their units, and ½ dmᵀ(H + δ)dm."""
        moves: list[Tensor] = []
        sums: list[Tensor] = []
        total = []

        def note(place: int, square: Tensor) -> None:
            unit = self._unit_of.get(len(moves) + place)
            sums.append(square.sum() if unit is None else unit.sum(square))

        for family in self.each():
            own = family.take_moves_()
            total.append(family.departure(own, note))
            moves += own
        return moves, sums, torch.stack([each.to(moves[0].device) for each in total]).sum() * (0.5 / self.num_data)

    def next_draw_(self) -> None:
        """Go on to the next draw, from the mean as it is now, and write that into a network in training."""
        self.draw += 1
        self.holds_draw = True  # or a move, in any case not the mean
        if self.model.training and self.sampling:
            self.draw_()
        else:
            self.mean_()

    def observe_(self, gradients: list[Tensor | None], scale: float, rate: float) -> None:
        """Observe the curvature scale · g gᵀ: its running mean moves, and the covariance with it at the next step.

        The mean is over the last fourth of the observations, about, the k-th weighted by k³ (Shamir and Zhang 2013),
        until it is a mean over the last 1/rate: in a short run the curvature of the beginning, where the fit is poor,
        says little about that of the end.  Processes that train together share what each observed.  What is not finite
        is left out, and the covariance of a parameter that is frozen, of which g is None, stays.
        """
        self.observed += 1
        rate, at = max(rate, _LAST / (self.observed + _LAST - 1)), 0
        with torch.no_grad():
            for family in self.each():
                each = zip(gradients[at : at + len(family.names)], family.mean, strict=True)
                statistics = family.statistics([None if g is None else g.to(m) for g, m in each], scale)
                at += len(family.names)
                known = [part for part in statistics if part is not None]
                average_over_ranks_(known)
                good = all_finite(known)
                if good.device.type != "cpu":  # without a wait for the device
                    zero_where_(known, ~good)
                    self._seen.append((family, statistics, good.to(known[0]) * rate))
                elif good:
                    self._seen.append((family, statistics, rate))

    @torch.no_grad()
    def refresh_(self) -> None:
        """Let the covariance follow what was observed since the last time; the draw cannot be made again then."""
        for family, statistics, rate in self._seen:
            family.absorb_(statistics, rate)
            family.bounded &= not self.linear
            family.refresh_()
        self._seen.clear()

    def temper_(self, temperature: float) -> None:
        """Change the temperature, and with it the width of q, without any training: V is proportional to it."""
        self.temperature = read_number("temperature", temperature, at_least=0)
        if self.holds_draw and not self.pinned:
            self.draw_()

    def get_extra_state(self) -> dict[str, Any]:
        """Return what a checkpoint holds beside tensors: scales are norms of units, and factor is that of the noise."""
        kept = {"draw": self.draw, "observed": self.observed, "seed": self.seed, "temperature": self.temperature}
        return {**kept, "scales": list(self.scales), "factor": self.likelihood.factor}

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """Take them up again; files of release 0.2 have no norms of units."""
        self.draw, self.observed, self.seed = int(state["draw"]), int(state["observed"]), int(state["seed"])
        self.temperature = float(state["temperature"])
        self.scales = list(map(float, state.get("scales", self.scales)))
        self.likelihood.factor = float(state.get("factor", 1.0))

    def __deepcopy__(self, memo: dict[int, Any]) -> "NetworkWeights":
        """Copy q with its network; the copy is attached to no optimizer, so that its network holds the mean."""
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        self.finish_step()
        copied.__dict__.update({name: copy.deepcopy(value, memo) for name, value in self.__getstate__().items()})
        copied.mean_()
        if copied._hooks.q is None:  # the network was copied before
            copied._hooks = Hooks(copied)
        return copied

    def __getstate__(self) -> dict[str, Any]:
        """What a copy or a pickle of q has: it is attached to no optimizer."""
        return {**self.__dict__, "sampling": False, "pinned": False, "unfinished": None, "ending": None, "detach": None}


def _read_prior(
    given: NetworkWeights | Mapping[str, Tensor] | None, weight: float
) -> tuple[Mapping[str, Tensor], dict[str, Tensor]]:
    """Read the means and, of a posterior, the precisions Nδ + w N h that a prior has by the names of parameters."""
    weight = read_number("prior_weight", weight, "is how often the data of the earlier posterior count", above=0)
    if weight != 1 and not isinstance(given, NetworkWeights):
        raise InputError(
            "prior_weight is how often the data of an earlier posterior count, which prior= is not; the strength of a "
            "prior of means alone is prior_precision."
        )
    if given is None:
        return {}, {}
    if isinstance(given, NetworkWeights):
        given.finish_step()
        each = zip(given.names, (p for f in given.each() for p in f.precisions()), given.prior.values(), strict=True)
        data = weight - 1
        return given.mean, {name: p + data * (p - given.num_data * delta).clamp_min(0) for name, p, delta in each}
    values = list(given.values()) if isinstance(given, Mapping) else [given]
    if isinstance(given, Mapping) and values and all(isinstance(value, Tensor) for value in values):
        return given, {}
    wrong = next((value for value in values if not isinstance(value, Tensor)), given)
    raise InputError(
        "prior is the posterior of an earlier training, from torchngvi.network, or the means of weights by name, as "
        f"model.state_dict() has them; got {f'a {type(wrong).__name__}' if values else 'an empty mapping'}."
    )


def _before_loading(q: NetworkWeights, *given: Any) -> None:
    """End the step that is under way, which would count from the mean that is loaded."""
    q.finish_step()


def _after_loading(q: NetworkWeights, keys: Any) -> None:
    """Let the network hold the mean that was loaded."""
    q._seen.clear()
    q.holds_draw = True
    q.mean_()


class Written:
    """The writes of draws and means into the parameters of a network, between which others may read and change them."""

    def __init__(self) -> None:
        self.count = 0  # by which a change by something else can be noticed
        self.averages: list[tuple[weakref.ref[AveragedModel], int]] = []  # with their numbers of updates

    def note(self, drawn: bool) -> None:
        """Note that the parameters are about to be written, and say once that an average has taken in a draw."""
        self.count += 1
        for k, (reference, count) in enumerate(self.averages):
            average = reference()
            if average is None:
                continue
            known = average.n_averaged
            now = int(known) if known.device.type == "cpu" else known._version
            self.averages[k] = reference, now
            if drawn and now == count + 1:
                self.averages = []
                warn_caller(
                    "AveragedModel has averaged what the parameters hold, which is a draw of the weights in training. "
                    "Call update_parameters within `with q.at_mean():`, so that it averages their means."
                )
                return

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy has written nothing, and is averaged by nothing."""
        return type(self), ()


def _averaging() -> AveragedModel | None:
    """The AveragedModel that is copying a network for itself, if one is."""
    owners = (frame.f_locals.get("self") for frame in frames() if frame.f_code.co_name == "__init__")
    return next((owner for owner in owners if isinstance(owner, AveragedModel)), None)


class Hooks:
    """The hooks of one posterior on one network."""

    def __init__(self, q: "NetworkWeights") -> None:
        self.q: NetworkWeights | None = q
        self.owned: dict[nn.Module, dict[str, str]] = {}  # module -> its own name of a parameter -> q's name of it
        names = {p: name for name, p in q.model.named_parameters() if name in q.mean}
        for module in q.model.modules():
            own = {local: names[p] for local, p in module.named_parameters(recurse=False) if p in names}
            if own:
                self.owned[module] = own
        places = dict.fromkeys([q.model, *self.owned])
        self.handles = [module.register_forward_pre_hook(self.before_forward) for module in places]
        for module in self.owned:
            self.handles += [
                module.register_state_dict_post_hook(functools.partial(self.after_state_dict)),  # torch marks it
                module.register_load_state_dict_pre_hook(self.before_loading),
                module.register_load_state_dict_post_hook(self.after_loading),
            ]

    def before_forward(self, module: nn.Module, arguments: Any) -> None:
        """Let the parameters hold what the mode of the network asks for."""
        if self.q is None:
            return
        state = torch._C._get_tracing_state()
        traced = state is not None or getattr(torch.compiler, "is_exporting", bool)()  # from torch 2.7 on
        if traced and self.q.sampling and self.q.model.training and not self.q.pinned:
            raise InputError(
                "The network is traced or exported in training, where it holds a draw of its weights, another one for "
                "each step. Call model.eval() first, after which it holds their mean, or q.release(), after which it "
                "is any other network."
            )
        torch._C._set_tracing_state(None)  # type: ignore[attr-defined]  # what is written into the weights is no part of the network
        try:
            self.q.settle(self.q.model.training)
        finally:
            torch._C._set_tracing_state(state)  # type: ignore[attr-defined]

    def after_state_dict(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        """Put the means in the place of draws."""
        if self.q is None or not self.q.sampling:
            return
        self.q.finish_step()
        means = self.q.mean
        for local, name in self.owned[module].items():
            own = module.get_parameter(local)
            state[prefix + local] = means[name].detach().to(own.dtype)

    def before_loading(self, *given: Any) -> None:
        """Hold the mean, so that what is not loaded is not taken for a draw."""
        if self.q is not None:
            self.q.finish_step()
            self.q.mean_()

    def after_loading(self, module: nn.Module, keys: Any) -> None:
        """Take what was loaded for the mean, where it is not the mean in the dtype of the parameter."""
        if self.q is None:
            return
        known, means = set(self.q.parameters_of_network), self.q.mean
        with torch.no_grad():
            for local, name in self.owned[module].items():
                p, m = module.get_parameter(local), means[name]
                if p not in known:
                    raise InputError(
                        f"Loading with assign=True has replaced the parameter {name}, so that neither the posterior "
                        "nor the optimizer moves it any more; load with assign=False, or make the posterior afterwards."
                    )
                m.copy_(torch.where(p == m.to(p.dtype), m, p.to(m.dtype)))

    def __deepcopy__(self, memo: dict[int, Any]) -> "Hooks":
        """Copy the hooks with their posterior; a network that is copied alone is any network, at the mean."""
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.q, copied.owned, copied.handles = None, {}, []
        if self.q is None:
            return copied
        average = _averaging()
        if average is not None:
            self.q.written.averages.append((weakref.ref(average), 0))
        if id(self.q) in memo:
            copied.q, copied.owned = memo[id(self.q)], copy.deepcopy(self.owned, memo)
            return copied
        self.q.finish_step()
        with torch.no_grad():
            for p, m in zip(self.q.parameters_of_network, self.q.mean.values(), strict=True):
                alone = copy.deepcopy(p, memo)
                if self.q.sampling:
                    alone.copy_(m)
        return copied

    def remove(self) -> None:
        """Take the hooks away."""
        for handle in self.handles:
            handle.remove()
        self.q = None


def posterior_of(model: nn.Module) -> "NetworkWeights | None":
    """Find the posterior whose hooks a network has."""
    for hook in model._forward_pre_hooks.values():
        owner = getattr(hook, "__self__", None)
        if isinstance(owner, Hooks) and owner.q is not None:
            return owner.q
    return None


def refuse_replaced(model: nn.Module, names: list[str], parameters: list[nn.Parameter]) -> None:
    """Refuse a network some of whose parameters are no longer those that its posterior is over."""
    own = set(map(id, model.parameters()))
    for name, p in zip(names, parameters, strict=True):
        if id(p) not in own:
            raise InputError(
                f"The parameter {name} that q is over is no part of the network any more: its layer was replaced or "
                "reparametrised. Change the network before torchngvi.network, or release() q and make a new one."
            )
