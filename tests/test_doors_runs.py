"""What a fit leaves behind and what a stranger may send: formulas, runs, files of a cache, arrays."""

import itertools

import numpy as np
import pandas as pd
import pytest

from torchngvi.adapters.formula import Formula, mixed
from torchngvi.adapters.terms import FormulaColumns, FormulaTerms
from torchngvi.cli import main
from torchngvi.errors import InputError

# ------------------------------------------------------------------------------------ formulas


PAYLOADS = (
    "np.savetxt('MARK', x)",
    "np.f2py.os.system('touch MARK')",
    "np.save('MARK', x)",
    "np.memmap('MARK', shape=1)",
    "np.fromfile('MARK')",
    "np.lib.npyio.savez('MARK', x)",
    "np.exp.__class__(x)",
    "np.exp.at(x, 0)",
    "np.add.reduce(x)",
    "np.exp(x, x)",
    "np.exp(x, out=x)",
    "np.add(x, 1, x)",
    "np.frompyfunc(x, 1, 1)",
    "np.vectorize(np)",
    "np.where(x)",
    "np.ctypeslib.ctypes.CDLL('libc.so.6')",
    "np(x)",
    "open('MARK', 'w')",
    "eval('open(chr(77)+chr(65)+chr(82)+chr(75), chr(119))')",
    "exec('x')",
    "getattr(np, 'savetxt')('MARK', x)",
    "I(x)(x)",
    "`np.savetxt`('MARK', x)",
    "x.to_csv('MARK')",
    "x.values.tofile('MARK')",
    "install('cli')",
    "columns_of(x)",
    "formulae.matrices.design_matrices('y ~ x', x)",
    "__import__('os').system('touch MARK')",
    "(lambda z: np.savetxt('MARK', z))(x)",
    "[np.savetxt('MARK', x) for _ in x]",
    "f'{open(chr(77), chr(119))}'",
    "(z := x)",
    "x[np.savetxt('MARK', x)]",
    "{np.savetxt('MARK', x)}",
    "C(x, levels=open('MARK', 'w'))",
    "scale(*x)",
    "I(x) if x else x",
    "x; import os",
    "print(x)",
)
PLACES = (
    "y ~ x + {} + (1 | g)",
    "{} ~ x + (1 | g)",
    "y ~ x + ({} | g)",
    "y ~ x + (1 | {})",
    "y ~ x + (1 | g/{})",
    "y ~ scale({}) + (1 | g)",
    "y ~ x + offset(log({})) + (1 | g)",
    "y ~ x:{} + (1 | g)",
    "y ~ C(x, levels={}) + (1 | g)",
)


@pytest.fixture
def table():
    draw = np.random.default_rng(0)
    x = draw.normal(size=24)
    columns = {"y": x + draw.normal(size=24), "x": x, "w": np.exp(x), "kind": list("abc") * 8, "g": list("uvwz") * 6}
    return pd.DataFrame(columns)


class TestFormulas:
    @pytest.mark.parametrize("place", PLACES)
    def test_hostile_formulas_run_nothing(self, place, table, tmp_path, monkeypatch):
        """360 of them: each is refused in a sentence, at every door, and nothing has been written or changed."""
        monkeypatch.chdir(tmp_path)
        before = table.copy()
        for payload in PAYLOADS:
            text = place.format(payload)
            for door in (lambda f: mixed(f, table), FormulaColumns.of, FormulaTerms.of):
                with pytest.raises(InputError, match=r"^The formula|^A formula"):
                    door(text)
            assert not list(tmp_path.iterdir()), text
        pd.testing.assert_frame_equal(table, before)

    def test_a_refusal_names_the_call_and_lists_what_is_allowed(self, table):
        with pytest.raises(InputError, match=r"calls np\.savetxt, which no formula may.* scale, .* C, .* np\.log\(x\)"):
            mixed("y ~ x + np.savetxt('MARK', x) + (1 | g)", table)

    @pytest.mark.parametrize(
        "formula", ["y ~ x + np.f2py.os.system('touch MARK')", "y ~ np.savetxt('MARK', x) + (1|g)"]
    )
    def test_on_the_command_line(self, formula, table, tmp_path, monkeypatch, capsys):
        """With a grouping factor and without."""
        monkeypatch.chdir(tmp_path)
        table.to_csv("t.csv", index=False)
        assert main(["fit", "--data", "t.csv", "--formula", formula]) == 2
        assert ", which no formula may, as it could run any code" in capsys.readouterr().err
        assert [path.name for path in tmp_path.iterdir()] == ["t.csv"]

    @pytest.mark.parametrize(
        "term",
        [
            "log(w)",
            "np.log1p(w)",
            "np.arctan2(x, w)",
            "maximum(x, 0)",
            "scale(x)",
            "standardize(x)",
            "center(x)",
            "bs(x, df=4)",
            "poly(x, 2)",
            "poly(x, degree=2, raw=True)",
            "C(kind)",
            "S(kind)",
            "T(kind, 'b')",
            "C(kind, Sum())",
            "C(kind, Treatment('b'))",
            "offset(log(w))",
            "{x ** 2}",
            "I(x > 0)",
            "x*kind",
            "(x + kind)**2",
        ],
    )
    def test_formulas_that_compute_numbers_are_read(self, term, table):
        made = Formula(f"y ~ x + {term} + (1 | g)", table)
        again = made.of(table)
        np.testing.assert_allclose(again.X, made.rows.X, atol=1e-12)

    @pytest.mark.parametrize(
        ("text", "value"),
        [
            ("I((x + 1) * 2)", lambda x: (x + 1) * 2),
            ("{(x - 3) ** 2}", lambda x: (x - 3) ** 2),
            ("exp((x + 1) / 2)", lambda x: np.exp((x + 1) / 2)),
            ("I(2 ** (1 - (x - 1)))", lambda x: 2 ** (2 - x)),
        ],
    )
    def test_parentheses_inside_a_call_are_kept(self, text, value, table):
        """They were dropped where the formula was written again for its parts: I((x + 1) * 2) gave x + 2."""
        made = Formula(f"y ~ 0 + {text} + (0 + {text} | g)", table)
        np.testing.assert_allclose(made.rows.X[:, 0], value(table.x))
        np.testing.assert_allclose(made.rows.Z[:, 0], value(table.x))
        new = table.assign(x=table.x + 1)
        np.testing.assert_allclose(made.of(new).X[:, 0], value(new.x))
        assert made.fixed == [text.replace("{", "I(").replace("}", ")")]

    def test_names_in_backticks(self, table):
        table = table.rename(columns={"x": "my column", "g": "the group"})
        made = Formula("y ~ `my column` + (1 | `the group`)", table)
        np.testing.assert_array_equal(made.rows.X[:, 1], table["my column"])
        np.testing.assert_array_equal(made.of(table).groups, made.rows.groups)
        scaled = Formula("y ~ center(`my column`) + (1 | `the group`)", table)
        np.testing.assert_allclose(scaled.rows.X[:, 1], table["my column"] - table["my column"].mean())

    def test_what_is_not_read_is_refused(self, table):
        """It was left out in silence."""
        for rest in ("x", "e10", "'text'", "1e10"):
            with pytest.raises(InputError, match="cannot be read beyond"):
                Formula(f"y ~ x + (1 | g) {rest}", table)

    @pytest.mark.parametrize(
        "term", ["{10 ** 10 ** 10}", "I(x ** (9 ** 9 ** 9))", "(x + w) ** 999999999", "I(x * 1e400)"]
    )
    def test_powers_without_end(self, term, table):
        with pytest.raises(InputError, match="The formula"):
            Formula(f"y ~ {term} + (1 | g)", table)

    def test_variables_of_python_are_not_looked_at(self, table):
        secret = table.x  # noqa: F841
        with pytest.raises(InputError, match="names secret; the table has"):
            mixed("y ~ secret + (1 | g)", table)


def test_as_many_hostile_formulas_as_are_promised():
    assert len(list(itertools.product(PLACES, PAYLOADS))) >= 300
