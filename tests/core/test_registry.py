"""The list of names: complete, and what fits with what is what the parts say."""

import inspect

import helpers as cases
import pytest
import torch

from examples.compare_methods.stepping import steps
from torchngvi import GeneralizedLinear, methods, posteriors, registry
from torchngvi.errors import InputError
from torchngvi.posteriors.flat import LowRankGaussian, RankOneGaussian
from torchngvi.structures import Dense, Diagonal, block_diagonal


def needed(kind):
    """The arguments that a class must be given."""
    parameters = inspect.signature(kind).parameters.values()
    return {p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}


def test_every_posterior_is_named():
    """But those that are made of another: a mixture, a product, a warped one."""
    assert {kind.__name__ for kind in registry.POSTERIORS.values()} == {
        name for name in posteriors.__all__ if isinstance(getattr(posteriors, name), type)
    } - {"Mixture", "Product", "Warped"}


def test_every_method_that_needs_no_more_than_a_posterior_and_a_step_is_named():
    exported = {name: getattr(methods, name) for name in methods.__all__ if name != "Method"}
    flat = {name for name, kind in exported.items() if issubclass(kind, methods.PreconditionedVI)}
    rest = {kind for name, kind in exported.items() if name not in flat and needed(kind) <= {"posterior", "lr"}}
    assert set(registry.METHODS.values()) == rest
    named = {kind.__name__ for kind in registry.FLAT_METHODS.values()}
    assert named == flat - {"PreconditionedVI"}  # which needs a metric


def test_every_flat_gaussian_is_named():
    """But those with factors, whose number is the user's to choose."""
    kinds = {getattr(posteriors.flat, name) for name in posteriors.flat.__all__}
    named = {kind for kind in kinds if hasattr(kind, "standard")}
    assert set(registry.FLAT_POSTERIORS.values()) == named - {LowRankGaussian, RankOneGaussian}
    assert not set(registry.FLAT_POSTERIORS) & set(registry.POSTERIORS)
    for name in registry.FLAT_POSTERIORS:
        q = registry.posterior(name, 3, (2,), mean=1.0, scale=2.0, dtype=cases.DTYPE)
        cases.close(q.covariance, 4 * torch.eye(3, dtype=cases.DTYPE).expand(2, 3, 3), 1e-12)
        wide = (q.covariance.new_ones(3, 3) if registry.structure_of(name) == "full" else torch.eye(3)).bool()
        assert wide.all() == (name != "mean_field")


@pytest.mark.parametrize("name", registry.FLAT_METHODS)
def test_flat_methods_step_on_flat_posteriors(name):
    model = GeneralizedLinear(cases.randn(9, 3, seed=0), torch.arange(9) % 2)
    assert registry.partners(name) == tuple(registry.FLAT_POSTERIORS)
    assert not registry.needs_lr(name)
    assert not registry.by_trial(name)
    for other in registry.FLAT_POSTERIORS:
        q = registry.posterior(other, 3, dtype=cases.DTYPE)
        opt = registry.method(name, q, 1e-3)
        opt.step(model)
        assert opt.rejections == 0
        assert float(q.mean.abs().sum()) > 0


@pytest.mark.parametrize("name", registry.METHODS)
def test_partners_are_those_that_take_the_move(name):
    """By what the rule emits and q takes; SRVN on (S m, S) would be VN, and is refused by name."""
    for other, kind in registry.POSTERIORS.items():
        q = registry.posterior(registry.partners(name)[0], 2)
        emits = registry.method(name, q, 1.0).rule.emits
        fits = emits in kind.takes and (name, other) != ("srvn", "natural")
        assert (other in registry.partners(name)) == fits


def test_which_methods_need_a_step():
    """Those of Euclidean and transport gradients, whose steps have units."""
    needy = {name for name in registry.METHODS if registry.needs_lr(name)}
    assert needy == {"bwgd", "svgd", "covariance_gd", "root_gd", "proximal_bbvi"}
    by_trial = {name for name in registry.METHODS if registry.by_trial(name)}
    assert by_trial == {"vn", "srvn", "symmetric_srvn", "newton_cg", "iblr"}


@pytest.mark.parametrize("structure", ["full", "diagonal", "1,2", None])
@pytest.mark.parametrize("name", registry.METHODS)
def test_every_pair_steps(name, structure):
    model = GeneralizedLinear(cases.randn(9, 3, seed=0), torch.arange(9) % 2)
    for other in registry.partners(name):
        if other == "diagonal" and structure not in ("diagonal", None):
            continue
        q = registry.posterior(other, 3, structure=structure, dtype=cases.DTYPE)
        opt = registry.method(name, q, 1e-2)
        opt.step(model)
        assert opt.rejections == 0
        assert float(q.mean.abs().sum()) > 0


def test_patterns():
    for structure, pattern in {"full": Dense(3), "diagonal": Diagonal(3), "3": None, "1,1,1": Diagonal(3)}.items():
        if pattern is None:
            with pytest.raises(InputError, match="or the sizes of blocks such as 1,4,2; got '3'"):
                registry.pattern(structure, 3)
        else:
            assert registry.pattern(structure, 3) == pattern
    assert registry.posterior("natural", 5, (2,), structure="2,3").structure.sizes == block_diagonal([2, 3]).sizes
    assert registry.posterior("diagonal", 2, structure="1,1").structure == Diagonal(2)


def test_a_check_takes_no_memory():
    registry.check("vn", "precision", "999999999,999999999")
    assert registry.widths("99999,2", 5) == (99999, 99999**2 + 4)


class TestSteps:
    def test_looks_where_it_is_due_and_stops_where_the_loop_does(self):
        taken = []
        for look in steps(taken.append, 10, {0, 3, 5, 9}):
            assert len(taken) == look.iteration
            if look.iteration == 5:
                break
        assert taken == [1, 2, 3, 4, 5]

    def test_every_step_without_the_start(self):
        looks = list(steps(lambda number: -number, 3))
        assert [(look.iteration, look.value) for look in looks] == [(1, -1), (2, -2), (3, -3)]

    def test_seconds_are_those_of_the_steps(self, monkeypatch):
        clock = iter([10.0, 11.0, 50.0, 52.0])  # what is done between two steps takes 39
        monkeypatch.setattr("time.process_time", lambda: next(clock))
        assert [look.seconds for look in steps(lambda _: None, 2, {0, 1, 2})] == [0.0, 1.0, 3.0]
