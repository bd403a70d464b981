"""Coordinate ascent over the sites of a product: messages added up, one site after the other.

    η_i' = (1 - γ) η_i + γ (Σ_j scale_j message_ij - b_i)

With exact messages γ = 1 is CAVI.  Where a factor of a site is not conjugate its messages are estimates from draws: a
step is then at most 0.7 long in Fisher length and γ_t = (1 + t/20)^-¾, as for one exponential family.  In batches γ is
the schedule of the graph, which is stochastic variational inference (Hoffman, Blei, Wang and Paisley 2013).
"""

import math
from collections import deque
from typing import Any

import torch
from torch import Tensor

from torchngvi.errors import InputError
from torchngvi.fitting.checkpoints import describe, describe_problem
from torchngvi.fitting.fit import Request, tolerance_of
from torchngvi.fitting.loop import Ending, Engine
from torchngvi.fitting.records import Record
from torchngvi.fitting.stopping import Criterion, Standing, Stop
from torchngvi.interfaces import Target
from torchngvi.models.factor_graph import Factor, FactorGraph
from torchngvi.numerics.linalg import anderson
from torchngvi.posteriors.product import Product, natural_form


class Anderson:
    """Anderson acceleration of a fixed-point iteration of positive numbers in their logarithms (Walker and Ni 2011)."""

    def __init__(self, memory: int) -> None:
        self.memory = memory
        self.points: list[Tensor] = []  # x, (n,)
        self.residuals: list[Tensor] = []  # G(x) - x
        self.best = math.inf  # the smallest loss so far
        self.image: Tensor | None = None  # G(x) there, to which the iteration goes back where the bound has fallen

    def next(self, x: Tensor, image: Tensor, loss: float) -> Tensor:
        """Take in an iterate (n,) with its image G(x) and its loss, and return the next iterate."""
        if loss <= self.best:
            self.best, self.image = loss, image
        self.points = [*self.points, x][-self.memory - 1 :]
        self.residuals = [*self.residuals, image - x][-self.memory - 1 :]
        return image + (anderson(self.points, self.residuals) - image).clamp(-1.0, 1.0)


def sweeps_of(request: Request) -> tuple["CoordinateSweeps", Criterion]:
    """Make the engine of a `Request` for a product, and what ends its run."""
    if request.optimizer is not None:
        raise InputError("a Product is fitted site by site, without an optimizer; leave optimizer= out.")
    assert isinstance(request.q, Product)
    engine = CoordinateSweeps(request.q, request.target, request.tolerance_or(tolerance_of))
    return engine, request.until_unimproved(engine.tolerance)


class CoordinateSweeps(Engine):
    """Sweeps over the sites of a product, each an evaluation with the ELBO before it and its length for γ = 1."""

    unit = "sweep"

    def __init__(self, q: Product, graph: Target, tolerance: float, window: int = 20) -> None:
        super().__init__(q)
        if not isinstance(graph, FactorGraph):
            raise InputError(
                f"a Product is fitted to a FactorGraph, which says which sites each factor reads; got "
                f"{type(graph).__name__}. Make one: FactorGraph([SiteFactor(function, 'mu', 'tau'), ...])."
            )
        graph.check(q)
        self.product, self.graph, self.tolerance, self.name = q, graph, tolerance, "CAVI"
        self.batches = graph.batches
        self.steps, self.draws, self.rejections = 0, 0, 0
        self.window = max(window, len(graph.batches))  # sweeps in the moving average of a loss with noise
        self.losses: deque[float] = deque(maxlen=self.window)
        self.best, self.best_at = math.inf, 0
        self.forms = {name: natural_form(q[name]) for name in q}
        self.moved = [name for name in q if name not in graph.local]
        self.cold = {name: self.forms[name].natural().clone() for name in graph.local}
        self.certain = graph.comparable
        self.anderson = Anderson(graph.memory) if graph.memory else None

    @torch.no_grad()
    def advance(self) -> Standing:
        """Prepare the messages, solve the local sites, and move the others one after the other."""
        self.mark()
        factors = self.graph.factors(self.steps)
        for factor in factors:
            self.draws += factor.prepare(self.product)
        self.certain = self.graph.comparable and all(factor.exact for factor in factors)
        omega = self._expectations()
        self._solve_locals(factors, omega)
        loss = self._loss(factors, omega)
        if self.anderson is not None:
            loss = self._checked(self.anderson, loss, factors, omega)
            before = self._flat().log()
        norm2 = torch.zeros((), dtype=loss.dtype, device=loss.device)
        gamma = self._gamma()
        for name in self.moved:
            norm2 = norm2 + self._move(name, factors, omega, gamma).sum()
        if self.anderson is not None:
            self._put_all(self.anderson.next(before, self._flat().log(), float(loss)).exp())
        self.steps += 1
        return self._standing(loss, float(norm2.sqrt()), gamma)

    def _expectations(self) -> dict[str, Tensor]:
        """The expectations of the sufficient statistics of each site."""
        return {name: form.expectation() for name, form in self.forms.items()}

    def _flat(self) -> Tensor:
        """The natural parameters of all sites, one after another."""
        return torch.cat([self.forms[name].natural().flatten() for name in self.moved])

    def _checked(self, steps: Anderson, loss: Tensor, factors: list[Factor], omega: dict[str, Tensor]) -> Tensor:
        """The loss before a sweep; where an accelerated step has raised it, after a plain sweep from the best point."""
        if not self.certain or not bool((self._flat() > 0).all()):
            raise InputError(
                "memory= accelerates sweeps of conjugate factors in the logarithms of natural parameters, which are "
                f"positive for Gamma, InverseGamma, Beta and Dirichlet sites; got {self.product!r}"
                f"{'' if self.certain else ', with a factor that is not conjugate'}. Leave memory= out."
            )
        if steps.image is None or float(loss) <= steps.best:
            return loss
        self.rejections += 1
        self._put_all(steps.image.exp())
        steps.points, steps.residuals = [], []
        omega.update(self._expectations())
        return self._loss(factors, omega)

    def _put_all(self, eta: Tensor) -> None:
        parts = eta.split([self.forms[name].natural().numel() for name in self.moved])
        for name, part in zip(self.moved, parts, strict=True):
            self.forms[name].put(part.reshape(self.forms[name].natural().shape))

    def _gamma(self, until: int = 20) -> float:
        """γ of the steps that are not exact: near 1 for so many steps, then falling."""
        if not self.graph.comparable:
            return self.graph.schedule(self.steps)
        return 1.0 if self.certain else (1 + self.steps / until) ** -0.75

    def _move(
        self, name: str, factors: list[Factor], omega: dict[str, Tensor], gamma: float, trust: float = 0.7
    ) -> Tensor:
        """Move a site, along estimates by so much in Fisher length; that of the whole change, squared, (*batch,)."""
        form, eta = self.forms[name], self.forms[name].natural()
        goal, exact = self._goal(name, factors, omega)
        change = goal - eta
        norm2 = form.norm2(change)
        if exact:
            self._put(name, goal if self.graph.comparable else eta + gamma * change, omega)
            return norm2
        length = (trust / norm2.sqrt().clamp_min(torch.finfo(norm2.dtype).tiny)).clamp_max(gamma)
        if bool(form.put(form.retracted(length[..., None] * change))):
            omega[name] = form.expectation()
        else:
            self.rejections += 1
        return norm2

    def _goal(self, name: str, factors: list[Factor], omega: dict[str, Tensor]) -> tuple[Tensor, bool]:
        """The natural parameters that the messages to a site add up to, and whether all of them are exact."""
        own = [factor for factor in factors if name in factor.sites]
        scale = own[0].scale if name in self.cold and own else 1.0
        messages = [factor.message(name, omega).mul(factor.scale / scale) for factor in own]
        return sum(messages, -self.forms[name].base()), all(factor.exact for factor in own)

    def _put(self, name: str, eta: Tensor, omega: dict[str, Tensor]) -> None:
        """Put a site where its exact messages lead."""
        if not bool(self.forms[name].put(eta)):
            raise InputError(
                f"the messages to the site {name!r} add up to no {type(self.product[name]).__name__}: "
                f"{self.product[name].domain} is violated. Give the site a proper prior, or another family."
            )
        omega[name] = self.forms[name].expectation()

    def _solve_locals(self, factors: list[Factor], omega: dict[str, Tensor], every: int = 2, most: int = 100) -> None:
        """Bring the local sites from their start to their optimum given the others, by so many sweeps at most."""
        if not self.cold:
            return
        for name, start in self.cold.items():
            own = [factor for factor in factors if name in factor.sites]
            if not own or any(not factor.exact for factor in own) or len({factor.scale for factor in own}) > 1:
                raise InputError(
                    f"the local site {name!r} is solved by exact messages of one scale; it has the factors over "
                    f"{[(factor.sites, factor.scale, 'exact' if factor.exact else 'not conjugate') for factor in own]}."
                )
            self.forms[name].put(start)
            omega[name] = self.forms[name].expectation()
        enough = 0.01 if self.graph.comparable else 0.2  # Fisher length of a member's change: of all data, of a batch
        for sweep in range(1, most + 1):
            lengths = []
            for name in self.cold:
                goal, _ = self._goal(name, factors, omega)
                if sweep % every == 0:
                    lengths.append(self.forms[name].norm2(goal - self.forms[name].natural()).max())
                self._put(name, goal, omega)
            if lengths and bool(torch.stack(lengths).max() <= enough**2):
                break

    def _loss(self, factors: list[Factor], omega: dict[str, Tensor]) -> Tensor:
        """The negative ELBO, or its estimate."""
        total = sum(factor.scale * factor.value(omega) for factor in factors)
        for name in self.forms:
            scales = [factor.scale for factor in factors if name in factor.sites] if name in self.cold else [1.0]
            total = total + scales[0] * self.product[name].entropy().sum()
        return -total  # type: ignore[return-value]

    def _standing(self, loss: Tensor, norm: float, gamma: float) -> Standing:
        value = float(loss)
        if not self.certain:
            self.losses.append(value)
            smoothed = sum(self.losses) / self.window if len(self.losses) == self.window else math.inf
            if smoothed < self.best:
                self.best, self.best_at = smoothed, self.steps
        record = Record(self.steps, value, norm, gamma, self.rejections, 0, 0.0)
        return Standing(
            record,
            torch.tensor(self.certain and norm <= self.tolerance, device="cpu"),
            loss,
            (self.steps, 0),
            self.tolerance,
            best=self.best,
            idle=0 if self.certain else self.steps - max(self.best_at, self.window),
            where="" if self.certain else f"a best smoothed value of {self.best:.6g}",
            values=self.draws,
        )

    # -------------------------------------------------------------------------------- the end

    @torch.no_grad()
    def ending(self, stop: Stop | None, last: Standing) -> Ending:
        """The outcome, with the loss after the last sweep; of estimates the last smoothed one, never "converged"."""
        assert stop is not None
        if self.certain:
            if self.anderson is not None and self.anderson.image is not None:
                self._put_all(self.anderson.image.exp())  # no worse than the best, by a plain sweep
            loss = float(self._loss(self.graph.factors(), self._expectations()))
            return Ending(stop.converged, stop.reason, loss, last.record.norm, last.members)
        reason = stop.reason
        if stop.converged:
            reason = f"because {reason.removesuffix('.')}, which of stochastic steps does not say that q is the best."
        loss = sum(self.losses) / max(len(self.losses), 1)
        return Ending(False, reason, loss, last.record.norm, last.members)

    def counted(self) -> tuple[int, int]:
        """No gradients, and the values of the factors."""
        return 0, self.draws

    # -------------------------------------------------------------------------------- checkpoints

    def settings(self) -> dict[str, str]:
        """The settings of the run: the sites, the factors and what is local."""
        factors = [f"{', '.join(factor.sites)} x {factor.scale:g}" for factor in self.graph.factors()]
        return {
            **describe_problem(self.product, self.graph),
            "method": type(self).__name__,
            "factors": "; ".join(factors),
            "local": ", ".join(self.graph.local),
            "schedule": describe(self.graph.schedule),
            "memory": str(self.graph.memory),
        }

    def state_dict(self) -> dict[str, Any]:
        """The state before a sweep: the product, the start of its local sites, and the values watched."""
        return {
            "posterior": self.product.state_dict(),
            "cold": self.cold,
            "counts": (self.steps, self.draws, self.rejections, self.best_at),
            "best": self.best,
            "losses": list(self.losses),
            "acceleration": {} if self.anderson is None else dict(vars(self.anderson)),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put everything where the saved sweep began, which is made again."""
        self.product.load_state_dict(state["posterior"])
        self.cold = {name: start.clone() for name, start in state["cold"].items()}
        self.steps, self.draws, self.rejections, self.best_at = state["counts"]
        self.best = state["best"]
        self.losses = deque(state["losses"], self.window)
        if self.anderson is not None:
            vars(self.anderson).update(state["acceleration"])
