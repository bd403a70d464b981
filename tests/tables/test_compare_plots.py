"""What figures draw of a log: gaps, times, bands, and the look that all share."""

import numpy as np
import pandas as pd
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from torchngvi.app.compare import plots


def log(seeds=3, **columns):
    """Records of several seeds after 0, 1, 2, 5 and 9 steps."""
    parts = []
    for seed in range(seeds):
        part = {"seed": seed, "iteration": [0, 1, 2, 5, 9]}
        parts.append(pd.DataFrame(part | {key: make(seed) for key, make in columns.items()}))
    return pd.concat(parts, ignore_index=True)


class TestGaps:
    @pytest.mark.parametrize("unknown", [None, np.nan, np.inf])
    def test_without_an_optimum_there_is_none(self, unknown):
        assert plots.gap(pd.Series([3.0, 2.0]), unknown) is None

    def test_one_unknown_optimum_is_enough(self):
        assert plots.gap(pd.Series([3.0, 2.0]), pd.Series([1.0, np.nan])) is None

    def test_the_smallest_value_of_the_runs_is_not_the_optimum(self):
        values = pd.Series([7.0, 4.0, 2.5], index=[4, 5, 6])
        gaps = plots.gap(values, 2.0)
        assert gaps.tolist() == [5.0, 2.0, 0.5]
        assert list(gaps.index) == [4, 5, 6]
        assert plots.gap(values[:2], 2.0).tolist() == gaps[:2].tolist()  # what else was run does not matter


class TestTimes:
    def test_a_constant_step_is_exact(self):
        even = log(seconds=lambda _: [0.0, 0.25, 0.5, 1.25, 2.25])
        assert plots.step_seconds(even) == 0.25
        assert plots.axis(even, "seconds").to_dict() == {0: 0.0, 1: 0.25, 2: 0.5, 5: 1.25, 9: 2.25}

    def test_one_slow_step_does_not_stretch_the_axis(self):
        """What else the machine did: 100 seconds in one step of one seed."""
        times = {0: [0, 1, 2, 5, 9], 1: [0, 101, 102, 105, 109], 2: [0, 1, 2, 5, 9]}
        slow = log(seconds=lambda seed: [float(time) for time in times[seed]])
        assert plots.axis(slow, "seconds").tolist() == [0, 1, 2, 5, 9]

    def test_runs_are_told_apart(self):
        """A record is never compared with one of another seed, in whatever order they stand."""
        even = log(seconds=lambda seed: [1000.0 * seed + 2 * t for t in (0, 1, 2, 5, 9)]).sample(frac=1, random_state=0)
        assert plots.step_seconds(even) == 2

    def test_starts_are_seeds(self):
        even = log(seconds=lambda seed: [3.0 * t for t in (0, 1, 2, 5, 9)]).rename(columns={"seed": "start"})
        assert plots.step_seconds(even) == 3

    def test_other_axes_are_means(self):
        counted = log(draws=lambda seed: [seed, 1 + seed, 2 + seed, 5 + seed, 9 + seed])
        assert plots.axis(counted, "draws").tolist() == [1, 2, 3, 6, 10]
        assert plots.axis(counted).tolist() == [0, 1, 2, 5, 9]


class TestBands:
    def test_quantiles_over_the_seeds(self):
        values = log(seeds=5, gap=lambda seed: [10.0 * t + seed for t in (0, 1, 2, 5, 9)])
        found = plots.over_seeds(values, "gap", middle="median", levels=(0.25, 0.75))
        assert found.loc[5].tolist() == [52, 51, 53]
        assert plots.over_seeds(values, "gap").loc[9].tolist() == [92, 90, 94]

    def test_a_seed_that_is_lost_ends_the_line(self):
        values = log(gap=lambda seed: [5.0, 4.0, 3.0, np.inf if seed == 1 else 2.0, 1.0])
        assert np.isnan(plots.over_seeds(values, "gap")["middle"][5])
        assert plots.over_seeds(values, "gap")["middle"][2] == 3

    def test_what_is_drawn(self):
        values = log(gap=lambda seed: [4.0 + seed, 3.0 + seed, 2.0 + seed, 1.0 + seed, -1.0 + seed])
        axes = Figure().subplots()
        plots.band(axes, values, "gap", "a method", 2, floor=0.5)
        (line,), (filled,) = axes.lines, axes.collections
        assert line.get_xdata().tolist() == [0, 1, 2, 5]
        assert line.get_ydata().tolist() == [5, 4, 3, 2]
        assert (line.get_label(), line.get_color()) == ("a method", plots.color(2))
        edges = filled.get_paths()[0].vertices[:, 1]
        assert (edges.min(), edges.max()) == (1, 6)


class TestLook:
    def figure(self):
        figure = plots.blank_figure(6.0, 3.0, "A title", "A note of some length. " * 12)
        for axes in figure.subplots(1, 2):
            plots.style(axes, "panel", "iteration", "nats")
            axes.plot(np.linspace(0, 1, 50), np.sin(np.arange(50)), label="VN")
            axes.plot([0, 1], [1, 0], label="_quiet")
        plots.legend(figure)
        return figure

    def test_names_are_placed_once(self):
        figure = self.figure()
        assert [text.get_text() for text in figure.legends[0].get_texts()] == ["VN"]
        assert all(axes.get_legend() is None for axes in figure.axes)

    def test_without_names_there_is_no_legend(self):
        figure = plots.blank_figure(3.0, 3.0, "A title")
        plots.style(figure.subplots(), "panel")
        plots.legend(figure)
        assert figure.legends == []

    def test_a_long_note_is_broken_and_stays_in_the_figure(self):
        figure = self.figure()
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        box = figure._supxlabel.get_window_extent(canvas.get_renderer())
        assert box.x1 <= figure.bbox.x1
        assert "\n" in figure._supxlabel.get_text()

    def test_both_files_and_short_paths(self, tmp_path):
        """Places in the paths of an .svg have two digits; what scales the glyphs is left."""
        plots.save(self.figure(), tmp_path / "drawn")
        assert (tmp_path / "drawn.png").stat().st_size > 5000
        text = (tmp_path / "drawn.svg").read_text(encoding="utf-8")
        assert text.startswith("<?xml")
        assert plots._PATH.findall(text)
        assert not any(plots._DIGITS.search(path) for path in plots._PATH.findall(text))
        assert "scale(0.015625)" in text

    @pytest.mark.parametrize(
        ("label", "name"),
        [
            ("vn", "variational Newton (VN)"),
            ("srvn ", "square-root VN (SR-VN)"),
            ("root_gd=1e3", "gradient descent in (m, C), step 1e3"),
            ("svgd, small step", "Stein (SVGD-density), small step"),
            ("my method", "my method"),
        ],
    )
    def test_methods_in_words(self, label, name):
        assert plots.spoken(label) == name
