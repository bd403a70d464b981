"""The weights of a network as an optimizer meets them: a mean and a covariance, of which the parameters hold a draw.

The parameters of the network hold a draw θ in training, once an optimizer is attached, and the mean m in evaluation
and in `state_dict()`.
"""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from torchngvi.arguments import read_count, read_number, read_seed
from torchngvi.distributed import average_over_ranks_, same_on_ranks_
from torchngvi.errors import InputError
from torchngvi.networks.families import Family
from torchngvi.networks.finite import all_finite, zero_where_
from torchngvi.networks.hooks import Hooks, Written, posterior_of, refuse_replaced
from torchngvi.networks.layout import PriorPrecision, Structure, families, unwrapped
from torchngvi.networks.noise import seed_of

NUM_DATA = "is the number of labels in the training data"


FORGOTTEN = 100  # observations of the curvature over which the start is forgotten, where the steps are not known
_SHORTEST, _SHARE, _LONGEST = 100, 0.3, 1000  # the start is forgotten over this share of the steps, within bounds
_GONE = 1e-3  # the weight of the start in the geometric mean that is none
SETTLED = 7000  # observations after which the start is gone, however the training is planned
_LAST = 4  # the running curvature is a mean over the last fourth of the observations, about


class NetworkWeights(nn.Module):
    """What moves when a network's posterior is trained: the families, the draw, and what was seen of the curvature.

    Args:
        model, num_data, structure, prior_precision, temperature, seed: as in :func:`torchngvi.network`.

    Attributes:
        names: of the parameters that q is over.
        parameters_of_network: they themselves, in the same order.
        prior: the precision of the prior a datum, δ = λ/N, by name.

    Raises:
        InputError: for arguments that cannot be used, each with its sentence.
    """

    def __init__(
        self,
        model: nn.Module,
        num_data: int,
        structure: Structure,
        prior_precision: PriorPrecision,
        temperature: float,
        seed: int,
    ) -> None:
        super().__init__()
        self.num_data = read_count("num_data", num_data, NUM_DATA)
        self.seed = read_seed("seed", seed, "is an integer of less than 63 bits, the same in all processes")
        self.temperature = read_number("temperature", temperature, at_least=0)
        self._model = [unwrapped(model)]  # in a list, so that it is not a part of q
        if posterior_of(self.model) is not None:
            raise InputError("The network has a posterior already; use it, or take it away with its release().")
        self.families = families(self.model, self.num_data, structure, prior_precision)
        self.names = [name for family in self.each() for name in family.names]
        self.parameters_of_network = [p for family in self.each() for p in family.parameters_of_network]
        self.prior = {name: delta for f in self.each() for name, delta in zip(f.names, f.prior, strict=True)}
        self.draw, self.observed = 0, 0  # the number of the present draw, and of observations of the curvature
        self.memory: float = FORGOTTEN
        self._seen: list[tuple[Family, list[Tensor | None], float | Tensor]] = []  # what waits for the step
        self.unfinished: Callable[[], None] | None = None  # ends a step that one of several optimizers left out
        self.sampling, self.pinned, self.holds_draw = False, False, False
        self.written = Written()
        self.refresh_()
        self._hooks = Hooks(self)
        self.register_load_state_dict_pre_hook(_before_loading)
        self.register_load_state_dict_post_hook(_after_loading)

    @property
    def model(self) -> nn.Module:
        """The network."""
        return self._model[0]

    @property
    def mean(self) -> dict[str, Tensor]:
        """The means by name; the network's own parameters hold them in evaluation."""
        return self._named([family.mean for family in self.each()])

    @property
    def variance(self) -> dict[str, Tensor]:
        """The marginal variances by name."""
        return self._named([list(torch._foreach_mul(f.variances(), self.temperature)) for f in self.each()])

    def each(self) -> Iterator[Family]:
        """Iterate over the families."""
        return iter(self.families)  # type: ignore[arg-type]

    def _named(self, lists: list[list[Tensor]]) -> dict[str, Tensor]:
        return dict(zip(self.names, (tensor for part in lists for tensor in part), strict=True))

    def mean_(self, gradients: Mapping[str, Tensor] | None = None) -> None:
        """Write the mean into the parameters of the network, where they hold a draw.

        Args:
            gradients: by name, to which the prior's part δm is added; none by default.
        """
        if not self.holds_draw and gradients is None:
            return
        self.written.note(self.holds_draw and self.sampling and not self.pinned)
        with torch.no_grad():
            for family in self.each():
                if self.holds_draw:
                    family.follow_()
                if gradients is None:
                    family.mean_()
                else:
                    family.add_prior_(gradients, self.holds_draw)
        torch.clear_autocast_cache()  # of what the parameters held
        self.holds_draw = False

    def draw_(self) -> None:
        """Write the present draw into the parameters of the network; it is the same until the next step."""
        self._write_(self.seed, self.draw)

    @torch.no_grad()
    def _write_(self, seed: int, draw: int, share: float | Tensor | None = None) -> None:
        """Write a draw, after a share of the move that the parameters made where there is one."""
        spread = self.temperature**0.5
        self.written.note(self.holds_draw and self.sampling and not self.pinned)
        for family in self.each():
            family.follow_()
            if share is not None:
                family.advance_(share, seed, draw, spread)
                continue
            if not self.holds_draw:
                family.adopt_()
            family.draw_(seed, draw, spread)
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

    @torch.compiler.disable
    def _switch(self, wanted: bool) -> None:
        """Write the draw or the mean, out of sight of a compiler."""
        with torch.no_grad():
            self.draw_() if wanted else self.mean_()

    def settle(self, training: bool) -> None:
        """Let the parameters hold a draw in training and the mean in evaluation; called before every forward pass.

        Args:
            training: the mode of the network.
        """
        if self.unfinished is not None:
            self.finish_step()
        wanted = training and self.sampling
        if not self.pinned and wanted != self.holds_draw:
            self._switch(wanted)

    @contextmanager
    def at_mean(self) -> Iterator[None]:
        """Hold the mean in the parameters, whatever the mode of the network, until the block ends."""
        self.finish_step()
        before = self.pinned
        self.mean_()
        self.pinned = True
        try:
            yield
        finally:
            self.pinned = before
            self.settle(self.model.training)

    @contextmanager
    def drawn(self, number: int) -> Iterator[None]:
        """Hold a draw for predictions in the parameters until the block ends; those of the training stay untouched.

        Args:
            number: of the draw, from 0; the same number is the same draw as long as q does not move.
        """
        refuse_replaced(self.model, self.names, self.parameters_of_network)
        self.finish_step()
        before = self.pinned
        self._write_(seed_of(self.seed, 0, "predictions"), number)
        self.pinned = True
        try:
            yield
        finally:
            self.mean_()
            self.pinned = before
            self.settle(self.model.training)

    def next_draw_(self, share: float | Tensor) -> None:
        """Move the mean to where the parameters are, go on to the next draw, and write that into a network in training.

        Args:
            share: of the way that the mean goes.
        """
        self.draw += 1
        self.holds_draw = True  # or a move, in any case not the mean
        if self.model.training and self.sampling:
            self._write_(self.seed, self.draw, share)
            return
        for family in self.each():
            family.take_(share)
        self.mean_()

    def observe_(self, gradients: Sequence[Tensor | None], scale: float, rate: float) -> None:
        """Observe the curvature scale · g gᵀ: its running mean moves, and the covariance with it at the next step.

        The mean is over the last fourth of the observations, about, the k-th weighted by k³ (Shamir and Zhang 2013),
        until it is a mean over the last 1/rate: in a short run the curvature of the beginning, where the fit is poor,
        says little about that of the end.  Processes that train together share what each observed.  What is not finite
        is left out.

        Args:
            gradients: g, in the order of `names`; None for a parameter that is frozen, whose covariance stays.
            scale: the number of independent labels in g.
            rate: the smallest rate of the running mean.
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

    def plan_(self, steps: int | None, every: int) -> None:
        """Set over how many observations of the curvature the start is forgotten: those of a share of the training.

        It is 0.3, and at least 100 and at most 1,000 steps, as fewer observations say too little of the single weights.

        Args:
            steps: of the training, or None where they are not known, for 100 observations.
            every: steps from one observation to the next.
        """
        length = None if steps is None else min(max(_SHARE * steps, _SHORTEST), _LONGEST)
        self.memory = FORGOTTEN if length is None else length / every

    def refresh_(self) -> None:
        """Let the covariance follow what was observed since the last time; the start is forgotten by and by.

        It is called when the draw is not needed any more, so that a draw can be made again until then.
        """
        weight = math.exp(-self.observed / self.memory) if self.memory else 0.0
        if weight < _GONE:  # no powers from then on
            weight = 0.0
        with torch.no_grad():
            for family, statistics, rate in self._seen:
                family.absorb_(statistics, rate)
            self._seen.clear()
            for family in self.each():
                family.refresh_(weight)

    def temper_(self, temperature: float) -> None:
        """Change the temperature, and with it the width of q, without any training: V is proportional to it.

        Args:
            temperature: the new one.

        Raises:
            InputError: if it is negative or not finite.
        """
        self.temperature = read_number("temperature", temperature, at_least=0)
        if self.holds_draw and not self.pinned:
            self.draw_()

    def divergence(self) -> Tensor:
        """Return KL(q'‖q) T/N = ½ dmᵀV⁻¹dm T/N, in nats a datum, of the move that the parameters made from the mean.

        Returns:
            A number.
        """
        first, *others = [family.departure() for family in self.each()]
        for square in others:
            first = first + square.to(first)
        return first * (0.5 / self.num_data)

    def get_extra_state(self) -> dict[str, float | int]:
        """Return the integers and the temperature that a checkpoint holds."""
        return {"draw": self.draw, "observed": self.observed, "seed": self.seed, "temperature": self.temperature}

    def set_extra_state(self, state: dict[str, float | int]) -> None:
        """Take them up again.

        Args:
            state: what `get_extra_state` returned.
        """
        self.draw, self.observed, self.seed = int(state["draw"]), int(state["observed"]), int(state["seed"])
        self.temperature = float(state["temperature"])

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
        return {**self.__dict__, "sampling": False, "pinned": False, "unfinished": None, "ending": None}


def _before_loading(q: NetworkWeights, *given: Any) -> None:
    """End the step that is under way, which would count from the mean that is loaded."""
    q.finish_step()


def _after_loading(q: NetworkWeights, keys: Any) -> None:
    """Let the network hold the mean that was loaded."""
    q._seen.clear()
    q.holds_draw = True
    q.mean_()
