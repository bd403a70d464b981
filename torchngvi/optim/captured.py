"""A step whose tensors stay where they are in memory, so that one CUDA graph, or one compiled graph, repeats it.

A graph replays kernels on the addresses that it has seen, and nothing of Python.  An ordinary step makes new tensors
for the state of the optimizer and for the last evaluation; here they are written to where the old ones were, under a
mask that holds everything still once q has converged, so that the host need not look after every step.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from torchngvi.arguments import read_count, read_number, shown
from torchngvi.errors import InputError, PairError
from torchngvi.interfaces import Target
from torchngvi.models.log_joint import FullPrecision, as_target
from torchngvi.optim.evaluating import Evaluation, Report, Status
from torchngvi.optim.optimizer import NaturalGradientVI

_EAGER = 3  # calls before a graph is captured: libraries initialise themselves in the first


class CapturedStep:
    """A step of an optimizer on one target, repeated without Python: on CUDA as a graph, elsewhere as it is.

    Use it where launching the kernels takes longer than running them, as on a GPU with small D.  Each call takes
    the step that `NaturalGradientVI.step` takes.  On CUDA the first calls are ordinary, then one is captured into a
    `torch.cuda.CUDAGraph`, and from then on a call is one launch.

    Args:
        optimizer: over one posterior; between two calls neither it nor q may be changed, but for the entries of a
            learning rate that is a tensor.
        target: a model or a log joint.  The entries of its tensors may be changed where steps are not found by trial.
        tolerance: on the natural-gradient norm of L/γ; at a q that is within it a call changes nothing any more.  0 for
            no such stop.
        backend: of `torch.compile`, which then makes one graph of the step, such as "inductor"; None for none.

    Raises:
        InputError: a target that is read in batches or evaluated by several processes, a tolerance where norms are
            noisy, draws that are made on another device than that of q; at a call, another learning rate than before,
            or a q or a state of the optimizer that was changed since the last one.
        PairError: an optimizer of several posteriors, or of another kind.

    >>> from torchngvi import VN, CholeskyGaussian, GeneralizedLinear
    >>> q, model = CholeskyGaussian(2), GeneralizedLinear(torch.eye(2), [0.0, 1.0])
    >>> step = CapturedStep(VN(q), model, tolerance=1e-3)
    >>> step.run(100)
    True
    """

    def __init__(
        self, optimizer: NaturalGradientVI, target: Any, *, tolerance: float = 0.0, backend: str | None = None
    ) -> None:
        if not isinstance(optimizer, NaturalGradientVI):
            raise PairError(
                "a captured step is that of an optimizer of a posterior, such as VN(q); got "
                f"{type(optimizer).__name__}."
            )
        if not (backend is None or isinstance(backend, str) or callable(backend)):
            raise InputError(f"backend is one of torch.compile, such as 'inductor', or None; got {shown(backend)}.")
        self.q = optimizer._only_posterior("a captured step")
        target = as_target(target if optimizer.estimator is None else optimizer.estimator.prepared(target))
        _check(optimizer, target, tolerance)
        self.optimizer, self.target, self.tolerance, self.calls = optimizer, target, tolerance, 0
        try:
            self._body = self._step if backend is None else torch.compile(self._step, backend=backend, fullgraph=True)
        except RuntimeError as error:  # no such backend
            raise InputError(f"backend is one of torch.compile, such as 'inductor', or None; got {error}") from error
        self._graph: torch.cuda.CUDAGraph | None = None
        self._left: list[tuple[int, int]] = []  # as the last call left what it changes

    @torch.no_grad()
    def __call__(self) -> None:
        """Take one step, without a wait for the device."""
        on_cuda, lr = self.q.mean_probe.is_cuda, self.optimizer.param_groups[0]["lr"]
        if self.calls == 0:
            self._begin()
            self._lr = lr
        elif lr is not self._lr and (isinstance(lr, Tensor) or lr != self._lr):
            raise InputError(
                "the learning rate is another than at the first call, and a graph holds it as it was. Pass a tensor on "
                "the device of q, lr=torch.tensor(0.1), which is changed in place, as torch's schedulers do."
            )
        if self.calls and self._written() != self._left:
            raise InputError(
                "q or the state of the optimizer was changed since the last call, by a step, a load or a write; "
                "what is held of both is of before. Make a new CapturedStep."
            )
        optimizer = self.optimizer
        before = optimizer.evaluations, optimizer.gradients, optimizer.values
        self._unknown()
        with FullPrecision(self.q.mean_probe.device.type):
            if on_cuda:
                self._on_cuda()
            else:
                self._body()
        optimizer.evaluations, optimizer.gradients, optimizer.values = before
        self.calls += 1
        optimizer._count(self._cost)
        optimizer._opt_called = True  # type: ignore[attr-defined]  # torch's schedulers ask whether step was called
        self._unknown()
        self._left = self._written()

    @property
    def status(self) -> Status:
        """The loss of q and the squared natural norm of its gradient, (*batch,), before the last step.

        They stay on the device; the next call overwrites them.
        """
        return Status(self._row[0], self._row[1], None)

    @property
    def done(self) -> Tensor:
        """Whether all members were within the tolerance before the last step, 0-d, on the device."""
        return self._done[0]

    def run(self, most: int, every: int = 8) -> bool:
        """Take steps until q is within the tolerance; the host looks once in so many of them.

        Args:
            most: the number of steps.
            every: the number of steps from one look to the next.

        Returns:
            Whether q is within the tolerance.

        Raises:
            InputError: numbers of steps that are no whole numbers.
        """
        every = read_count("every", every, "counts the steps from one look to the next")
        most = most and read_count("most", most, "counts steps")
        for taken in range(1, most + 1):
            self()
            if (taken % every == 0 or taken == most) and self.tolerance > 0 and bool(self.done):
                return True
        return False

    def _begin(self) -> None:
        """Take hold of every tensor that a step changes; where steps are tried, evaluate the target at the start."""
        optimizer, target = self.optimizer, self.target
        target.admit(self.q)
        zero = torch.zeros_like(self.q.mean_probe[..., 0])
        self._row, self._done = torch.stack([zero] * 4), zero.new_zeros(1, dtype=torch.bool)
        leaves, shape = tree_flatten(optimizer._evaluated(target)[0] if optimizer.step_size.needs_trial else None)
        data = {id(tensor) for tensor in target.tensors()}
        self._packet, self._form = (
            [x if id(x) in data or not isinstance(x, Tensor) else _Held(x) for x in leaves],
            shape,
        )
        self._places = _places(optimizer._state(0))
        self._state = [_Held(values[name]) for values, name in self._places]

    # -------------------------------------------------------------------------------- what the graph does

    def _step(self) -> None:
        """A step, of which nothing but the contents of tensors is left."""
        optimizer, q, target = self.optimizer, self.q, self.target
        self._hold_state()
        evaluation: Evaluation | None = tree_unflatten(
            [x.now() if isinstance(x, _Held) else x for x in self._packet], self._form
        )
        with q.settled():
            if evaluation is None:
                evaluation = optimizer._evaluate_target(target, q)
                optimizer._forget_unless(evaluation.loss)
            self._cost = evaluation.e.cost
            heading = optimizer._heading(0, evaluation.e)
            norm2 = heading.norm2()
            if self.tolerance > 0:
                self._done.copy_((norm2 <= (self.tolerance * target.temperature) ** 2).all())
            done, here = self._done[0], q.snapshot()
            old = torch._foreach_mul([held.now() for held in self._state], 1)  # copies, by one kernel
            trial = optimizer._advance(
                0, evaluation, heading, lambda: optimizer._evaluate_target(target, q), target.coupled
            )
            q.assign(here, done.expand(q.batch_shape))
        assert optimizer.last is not None
        rho, accepted = optimizer.last
        self._row.copy_(torch.stack([evaluation.loss, norm2, rho, (accepted & ~done).to(norm2.dtype)]))
        # all of them before the first is written: the pairs of a quasi-Newton memory move up by one
        pairs = zip(old, self._places, strict=True)
        new = [torch.where(done, before, values[name]) for before, (values, name) in pairs]
        held = list(self._state)
        for after, before in zip(tree_flatten(trial)[0], self._packet, strict=True):
            if isinstance(before, _Held):
                new.append(torch.where(done, before.now(), after))
                held.append(before)
        torch._foreach_copy_([kept.now() for kept in held], new)
        self._hold_state()

    def _written(self) -> list[tuple[int, int]]:
        """Which tensors a step changes, as q and the optimizer have them now, and torch's count of writes to each."""
        state = [values[name] for values, name in _places(self.optimizer._state(0))]
        return [(id(x), 0 if x.is_inference() else x._version) for x in (*self.q.coordinates, *state)]

    def _hold_state(self) -> None:
        """Give the optimizer the tensors that are held for its state."""
        for (values, name), held in zip(self._places, self._state, strict=True):
            values[name] = held.now()

    def _on_cuda(self) -> None:
        """A step by Python, on a stream of its own, as the capture wants it of those before; later by the graph."""
        device = self.q.mean_probe.device
        if self.calls < _EAGER:
            stream, here = torch.cuda.Stream(device), torch.cuda.current_stream(device)
            stream.wait_stream(here)
            with torch.cuda.stream(stream):
                self._body()
            here.wait_stream(stream)
            return
        if self._graph is None:
            graph = torch.cuda.CUDAGraph()
            for generator in self.optimizer._generators().values():
                graph.register_generator_state(generator)
            with torch.cuda.device(device), torch.cuda.graph(graph):  # which runs nothing on the way
                self._body()
            self._graph = graph
        self._graph.replay()

    def _unknown(self) -> None:
        """What was computed from q is not known any more: a graph does not count what it writes."""
        torch.autograd.graph.increment_version(tuple(self.q.coordinates))
        self.optimizer._cache = None
        self.optimizer.last = Report(self._row[2], self._row[3] > 0)


def _check(optimizer: NaturalGradientVI, target: Target, tolerance: float) -> None:
    """Refuse what a graph cannot repeat, and a tolerance that is none."""
    read_number("tolerance", tolerance, "bounds the natural-gradient norm, 0 for no such stop,", at_least=0)
    if target.processes is not None or target.in_passes or target.batches:
        raise InputError(
            f"{type(target).__name__} is read in batches or by several processes, which the host does again at each "
            "evaluation, and a graph repeats what it has seen. Use step()."
        )
    if tolerance > 0 and not optimizer.evaluates_exactly(target):
        raise InputError(
            "a norm from draws or mini-batches is small by chance, and cannot end a run. Leave the tolerance out, and "
            "judge the run by its loss."
        )
    device = optimizer.posteriors[0].mean_probe.device
    for generator in optimizer._generators().values():
        if generator.device.type != device.type:
            raise InputError(
                f"the draws come from a generator on {generator.device.type}, and q is on {device.type}: a graph would "
                f"repeat the same draws. Pass torch.Generator({device.type!r}), or leave it out."
            )


class _Held:
    """A tensor at one address; of a number its vector of length 1, since torch.compile forgets writes to numbers."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.tensor = tensor.shape, tensor.clone().reshape(tensor.shape or (1,))

    def now(self) -> Tensor:
        return self.tensor.view(self.shape)


def _places(state: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    """Where the tensors of a state are, those of dicts within it included."""
    places = [(state, name) for name, value in state.items() if isinstance(value, Tensor)]
    for value in state.values():
        if isinstance(value, dict):
            places += _places(value)
    return places
