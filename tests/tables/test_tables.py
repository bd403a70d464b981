"""Reading and preparing data: what the arrays hold, and each bad input with its sentence."""

import gzip
import re

import numpy as np
import pytest
from sklearn.datasets import dump_svmlight_file, load_breast_cancer
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler

from torchngvi.app.columns import Table
from torchngvi.app.design import coded_target, prepare
from torchngvi.app.tables import read_table
from torchngvi.errors import InputError

PEOPLE = (
    "age, sex,ward,smoker,died\n50,male,A,True,no\n60,female,B,False,yes\n70,male,C,True,yes\n80,female,A,False,no\n"
)


def written(tmp_path, name, content):
    path = tmp_path / name
    data = content if isinstance(content, bytes) else content.encode()
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") and not data.startswith(b"\x1f\x8b") else data)
    return str(path)


class TestReading:
    @pytest.mark.parametrize("name", ["people.csv", "people.tsv", "people.csv.gz", "people.TSV.GZ"])
    def test_delimited(self, tmp_path, name):
        content = PEOPLE.replace(",", "\t") if "tsv" in name.lower() else PEOPLE
        path = tmp_path / name
        path.write_bytes(gzip.compress(content.encode()) if name.lower().endswith(".gz") else content.encode())
        table = read_table(str(path), target="died")
        assert table.names == ("age", "smoker", "sex=male", "ward=B", "ward=C")
        assert table.X.tolist() == [[50, 1, 1, 0, 0], [60, 0, 0, 1, 0], [70, 1, 1, 0, 1], [80, 0, 0, 0, 0]]
        assert table.y.tolist() == ["no", "yes", "yes", "no"]

    def test_weights_offset_and_drop(self, tmp_path):
        path = written(tmp_path, "claims.csv", "a,b,w,o,y\n1,x,2,0.5,0\n2,y,1,0.25,3\n")
        table = read_table(path, target="y", weights="w", offset="o", drop=["b"])
        assert table.names == ("a",)
        assert (table.weights.tolist(), table.offset.tolist(), table.y.tolist()) == ([2, 1], [0.5, 0.25], [0, 3])

    @pytest.mark.parametrize("name", ["toy.svm", "toy.libsvm", "toy.txt", "toy.svm.gz"])
    def test_svmlight(self, tmp_path, name):
        X, y = np.array([[0.0, 1.5, 0.0], [2.0, 0.0, 0.0]]), np.array([1, -1])
        plain = tmp_path / "plain"
        dump_svmlight_file(X, y, str(plain), zero_based=False)
        table = read_table(written(tmp_path, name, plain.read_bytes()), n_features=3)
        assert table.X.tolist() == X.tolist()
        assert table.y.tolist() == [1.0, -1.0]
        assert table.names == ("x1", "x2", "x3")

    def test_npz(self, tmp_path):
        path = tmp_path / "toy.npz"
        np.savez(path, X=np.eye(2, dtype=np.float32), y=[0, 1], feature_names=["a", "b"], w=[1, 2])
        table = read_table(str(path), weights="w", drop=["a"])
        assert (table.X.tolist(), table.names, table.weights.tolist()) == ([[0], [1]], ("b",), [1, 2])

    @pytest.mark.parametrize(
        ("name", "shape"),
        [
            ("breast_cancer", (569, 30)),
            ("diabetes", (442, 10)),
            ("iris", (150, 4)),
            ("wine", (178, 13)),
            ("digits", (1797, 64)),
        ],
    )
    def test_bundled(self, name, shape):
        assert read_table(name).X.shape == shape

    def test_breast_cancer_keeps_its_coding(self):
        y, classes = coded_target(read_table("breast_cancer"), classes=True)
        assert classes == ("malignant", "benign")
        assert np.array_equal(y, load_breast_cancer().target)

    def test_a_column_of_a_bundled_set_may_be_the_target(self):
        table = read_table("diabetes", target="bmi")
        assert "target" in table.names
        assert "bmi" not in table.names


class TestMoreThan64Bits:
    """Integers of 20 digits and more: numbers where float64 tells all of them apart, else names."""

    LONG = [10**19 * k for k in (1, 2, 3, 4)]

    def read(self, tmp_path, columns, **arguments):
        lines = zip(*columns.values(), strict=True)
        text = "\n".join([",".join(columns), *(",".join(map(str, line)) for line in lines)])
        return read_table(written(tmp_path, "a.csv", text + "\n"), target="y", **arguments)

    @pytest.mark.parametrize("first", [10**20, -1], ids=["objects", "texts"])
    def test_numbers(self, tmp_path, first):
        column = [first, *self.LONG[1:]]
        table = self.read(tmp_path, {"a": column, "w": self.LONG, "y": self.LONG}, weights="w")
        assert table.X[:, 0].tolist() == column
        assert table.names == ("a",)
        assert table.weights.tolist() == self.LONG
        assert table.y.tolist() == self.LONG

    def test_ids_that_differ_in_the_last_digits_stay_apart(self, tmp_path):
        ids = [10**25 + k for k in (1, 2, 1, 2)]
        table = self.read(tmp_path, {"a": ids, "y": ids})
        assert table.names == (f"a={ids[1]}",)
        assert table.X[:, 0].tolist() == [0, 1, 0, 1]
        assert table.y.tolist() == [str(value) for value in ids]


class TestTarget:
    def table(self, y, labels=()):
        return Table(np.zeros((len(y), 1)), np.array(y), ("x",), "y", labels)

    @pytest.mark.parametrize(
        ("y", "success", "coded", "classes"),
        [
            (["no", "yes", "no"], None, [0, 1, 0], ("no", "yes")),
            (["no", "yes", "no"], "no", [1, 0, 1], ("yes", "no")),
            ([2.0, 4.0, 2.0], None, [0, 1, 0], ("2", "4")),
            ([True, False, False], None, [1, 0, 0], ("False", "True")),
            (["a", "b", "c"], "b", [0, 1, 0], ("not b", "b")),
        ],
    )
    def test_two_classes(self, y, success, coded, classes):
        got, names = coded_target(self.table(y), classes=True, success=success)
        assert (got.tolist(), names) == (coded, classes)

    def test_numbers(self):
        y, classes = coded_target(self.table([3, 0]), classes=False)
        assert (y.tolist(), classes) == ([3.0, 0.0], None)

    @pytest.mark.parametrize(
        ("y", "classes", "success", "message"),
        [
            (["yes"] * 3, True, None, "target 'y' has one class, 'yes' in all 3 rows; a Bernoulli family needs two"),
            (
                ["a", "b", "c"],
                True,
                None,
                "target 'y' has 3 classes (a, b, c); a Bernoulli family needs two. Name the one",
            ),
            (
                list(range(12)),
                True,
                None,
                "target 'y' has 12 classes (0, 1, 2, 3, 4, ..); a Bernoulli family needs two. They are whole"
                " numbers: say --likelihood poisson for counts (negative_binomial where the columns do not"
                " explain their variance, 2.2 times their mean), or gaussian",
            ),
            (
                [0.5 * k for k in range(12)],
                True,
                None,
                "a Bernoulli family needs two. They are measurements: say --likelihood gaussian.",
            ),
            (
                [0, 1, 2, 3],
                True,
                None,
                "Name the one to predict against the others (--success '3'), or, if they are counts, say --likelihood",
            ),
            (["a", "b", "c"], True, "B", "success 'B' is no class of 'y'. Did you mean 'b'? The classes are: a, b, c."),
            (["a", "b"], False, None, "this family needs a target of numbers; 'y' holds classes such as 'a'"),
        ],
    )
    def test_what_is_refused(self, y, classes, success, message):
        with pytest.raises(InputError, match=re.escape(message)):
            coded_target(self.table(y), classes=classes, success=success)


class TestPreparing:
    def test_split_and_scales_are_scikit_learns(self):
        table = read_table("breast_cancer")
        y, classes = coded_target(table, classes=True)
        data = prepare(table, y, classes, test_fraction=0.3, seed=7)
        X = load_breast_cancer().data
        train, test, y_train, y_test = train_test_split(X, y, test_size=0.3, random_state=7)
        scaler = StandardScaler().fit(train)
        for rows, raw, targets in ((data.train, train, y_train), (data.test, test, y_test)):
            np.testing.assert_allclose(rows.X[:, 1:], scaler.transform(raw), atol=1e-10)
            assert (rows.X[:, 0] == 1).all()
            assert np.array_equal(rows.y, targets)
        assert data.names[:2] == ("intercept", "mean radius")
        np.testing.assert_allclose((X[:3] - data.center[1:]) / data.scale[1:], scaler.transform(X[:3]), atol=1e-10)

    def test_constant_columns_stay_finite(self):
        table = Table(np.array([[0.1, 1.0], [0.1, 2.0], [0.1, 4.0]]), np.arange(3.0), ("constant", "x"), "y")
        data = prepare(table, table.y, None, test_fraction=0)
        assert data.train.X[:, 1].tolist() == [0, 0, 0]
        assert data.scale.tolist()[:2] == [1, 1]
        assert len(data.test.y) == 0

    def test_as_it_is(self):
        table = Table(np.array([[1.0], [3.0]]), np.arange(2.0), ("x",), "y", (), np.array([1.0, 2.0]))
        data = prepare(table, table.y, None, standardize=False, intercept=False, test_fraction=0)
        assert (data.train.X.tolist(), data.names, data.train.weights.tolist()) == ([[1], [3]], ("x",), [1, 2])

    def test_training_rows_of_one_class(self):
        table = Table(np.zeros((10, 1)), np.array([1.0] + [0.0] * 9), ("x",), "y")
        held_out = next(s for s in range(100) if 0 in train_test_split(np.arange(10), test_size=0.2, random_state=s)[1])
        with pytest.raises(InputError, match="the 8 training rows are all 'no', and a Bernoulli family needs both"):
            prepare(table, table.y, ("no", "yes"), test_fraction=0.2, seed=held_out)

    def test_too_few_rows(self):
        table = Table(np.zeros((1, 1)), np.zeros(1), ("x",), "y")
        with pytest.raises(InputError, match="1 rows cannot be split with test_fraction 0.2"):
            prepare(table, table.y, None, test_fraction=0.2)


BAD_FILES = {
    "empty csv": ("a.csv", "", {}, "is empty: a table needs a line of column names"),
    "binary csv": ("a.csv", b"PK\x03\x04\0\0\0\0", {}, "is no table of text: it holds binary data"),
    "no text at all": ("a.csv", b"a,y\n\x81\x8d,1\n", {}, "is no table of text in UTF-8 or Latin-1"),
    "no header": (
        "b.csv",
        "1;2,5\n3;4,5\n",
        {},
        "has no line of column names: its first line is '1;2,5'. Put a line in front with one name for each of the 2 "
        "columns, such as x1;x2.",
    ),
    "ragged csv": ("a.csv", "a,y\n1,2\n1,2,3\n", {}, "cannot be read as a table: Error tokenizing data"),
    "not gzip": ("a.csv.gz", b"\x1f\x8bnothing of the kind", {}, "cannot be read as a table"),
    "no rows": ("a.csv", "a,y\n", {}, "the table has column names and no rows"),
    "no target": (
        "a.csv",
        "a,y\n1,2\n",
        {"target": None},
        "name the column to predict (--target). The columns are: a, y.",
    ),
    "wrong target": (
        "a.csv",
        "age,died\n1,2\n",
        {"target": "dead"},
        "target column 'dead' is not in the data. Did you mean 'died'? The columns are: age, died.",
    ),
    "wrong weights": ("a.csv", "a,y\n1,2\n", {"weights": "w"}, "weights column 'w' is not in the data."),
    "wrong drop": ("a.csv", "a,y\n1,2\n", {"drop": ["b"]}, "drop column 'b' is not in the data."),
    "nothing left": ("a.csv", "a,y\n1,2\n", {"drop": ["a"]}, "no column is left to predict 'y' from"),
    "text weights": (
        "a.csv",
        "a,w,y\n1,x,2\n",
        {"weights": "w"},
        "weights column 'w' must hold numbers; got texts such as 'x'",
    ),
    "missing": (
        "a.csv",
        "a,b,y\n1,,2\n,,3\n3,1,4\n",
        {},
        "column 'b' has missing or infinite entries in 2 of 3 rows (and 1 of 'a')",
    ),
    "missing in three": (
        "a.csv",
        "a,b,c,y\n1,,2,1\n,,3,2\n3,1,,3\n",
        {},
        "column 'b' has missing or infinite entries in 2 of 3 rows (and 1 of 'a', 1 of 'c')",
    ),
    "one name twice": (
        "a.csv",
        "a,b,a ,y\n1,2,3,4\n",
        {},
        "two columns of the table are named 'a', without the spaces around their names. Rename one of them.",
    ),
    "too many categories": (
        "a.csv",
        "id,y\n" + "".join(f"{i},{i}\n" for i in range(60)),
        {"categorical": ["id"]},
        "column 'id' has 60 different values, more than the 50 of a category at most. Leave it out (--drop id), "
        'or model it as groups that are alike, --formula "... + (1 | id)".',
    ),
    "missing text": ("a.csv", "a,y\nx,1\n,2\n", {}, "column 'a' has missing or infinite entries in 1 of 2 rows"),
    "infinite": ("a.csv", "a,y\ninf,1\n2,2\n", {}, "column 'a' has missing or infinite entries in 1 of 2 rows"),
    "almost numbers": (
        "a.csv",
        "a,y\n1,1\n2,1\n?,1\n",
        {},
        "column 'a' is numbers except for 1 of 3 rows, the first '?'",
    ),
    "infinite target": (
        "a.csv",
        "a,y\n1,inf\n2,2\n",
        {},
        "in 1 of 2 rows. Drop or impute those rows, or name another column (--target).",
    ),
    "missing weights": (
        "a.csv",
        "a,w,y\n1,,1\n2,1,2\n",
        {"weights": "w"},
        "in 1 of 2 rows. Drop or impute those rows, or name another column (--weights).",
    ),
    "huge target": (
        "a.csv",
        "a,y\n1,1e150\n2,2\n",
        {},
        "overflow from 1e+140 on. Divide it by a constant, or name another column (--target).",
    ),
    "huge feature": ("a.csv", "a,y\n1e150,1\n2,2\n", {}, "by a constant, or leave the column out (--drop a)."),
    "huge feature of two words": (
        "a.csv",
        "Customer ID,y\n1e150,1\n2,2\n",
        {},
        "Divide it by a constant, or leave the column out (--drop 'Customer ID').",
    ),
    "almost numbers, of two words": (
        "a.csv",
        "Customer ID,y\n1,1\n2,1\n?,1\n",
        {},
        "leave the column out (--drop 'Customer ID'), or take it as categories (--categorical 'Customer ID').",
    ),
    "too many categories of two words": (
        "a.csv",
        "Customer ID,y\n" + "".join(f"{i},{i}\n" for i in range(60)),
        {"categorical": ["Customer ID"]},
        "Leave it out (--drop 'Customer ID'), or model it as groups",
    ),
    "names of two words": (
        "a.csv",
        "Customer ID,y\n" + "".join(f"P{i},{i}\n" for i in range(60)),
        {},
        "or dates, not categories. Leave it out (--drop 'Customer ID'), or model",
    ),
    "long ids": (
        "a.csv",
        "id,y\n" + "".join(f"{10**25 + i},{i}\n" for i in range(60)),
        {},
        "text column 'id' has 60 different values, more than 50: it looks like names or dates",
    ),
    "names": (
        "a.csv",
        "id,y\n" + "".join(f"P{i},{i}\n" for i in range(60)),
        {},
        "text column 'id' has 60 different values, more than 50: it looks like names or dates",
    ),
    "svmlight junk": ("a.svm", "a,b,c\n1,2,3\n", {"target": None}, "cannot be read as a svmlight file, lines such as"),
    "svmlight empty": ("a.svm", "", {"target": None}, "has no rows: a data set needs at least two"),
    "svmlight short": (
        "a.svm",
        "1 3:1\n0 5:1\n",
        {"target": None, "n_features": 3},
        "cannot be read as a svmlight file",
    ),
    "svmlight target": (
        "a.svm",
        "1 3:1\n",
        {},
        "a svmlight file has its target in the first field and no named columns",
    ),
    "svmlight nan": (
        "a.svm",
        "1 1:nan\n0 1:2\n",
        {"target": None},
        "column 'x1' has missing or infinite entries in 1 of 2 rows. Drop or impute those rows.",
    ),
    "svmlight bare": ("a.svm", "1\n0\n", {"target": None}, "has targets and no features"),
    "npz junk": ("a.npz", b"junk", {"target": None}, "cannot be read as an npz archive of numbers"),
    "unknown ending": ("a.xlsx", "junk", {}, "cannot tell the format of"),
    "n_features of csv": ("a.csv", "a,y\n1,2\n", {"n_features": 3}, "n_features is for svmlight files"),
}


@pytest.mark.parametrize("case", BAD_FILES, ids=str)
def test_bad_files(tmp_path, case):
    name, content, arguments, message = BAD_FILES[case]
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError, match=re.escape(message)):
        read_table(str(path), **{"target": "y", **arguments})


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"X": np.eye(2)}, "has no array 'y', it has X."),
        ({"data": np.eye(2), "y": [0, 1]}, "has no array 'X', it has data, y."),
        ({"X": np.array([["a"], ["b"]]), "y": [0, 1]}, "array 'X' of "),
        (
            {"X": np.array([[None]]), "y": [0]},
            "cannot be read as an npz archive of numbers (Object arrays cannot be loaded",
        ),
        ({"X": np.eye(2), "y": [0, 1, 1]}, "must have one entry for each of the 2 rows of X; got shape (3,)"),
        ({"X": np.ones(2), "y": [0, 1]}, "must be a matrix, one row an observation; got shape (2,)"),
        ({"X": np.eye(2), "y": [0, np.nan]}, "column 'y' has missing or infinite entries in 1 of 2 rows"),
        ({"X": np.eye(2), "y": [1j, 0]}, "must hold numbers or texts; got dtype complex128"),
        ({"X": np.ones((0, 2)), "y": np.ones(0)}, "has no rows"),
    ],
)
def test_bad_archives(tmp_path, arrays, message):
    path = tmp_path / "a.npz"
    np.savez(path, **arrays)
    with pytest.raises(InputError, match=re.escape(message)):
        read_table(str(path))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("brest_cancer", "'brest_cancer' is neither a file nor a bundled set. Did you mean 'breast_cancer'?"),
        ("nowhere/there.csv", "there is no data file 'nowhere/there.csv' (looked for /"),
    ],
)
def test_no_such_data(data, message):
    with pytest.raises(InputError, match=re.escape(message)):
        read_table(data, target="y")


def test_a_folder_is_no_data(tmp_path):
    with pytest.raises(InputError, match="data must be a file; .* is a folder"):
        read_table(str(tmp_path), target="y")
