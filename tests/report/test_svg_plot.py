import re

import numpy as np
import pytest

from paragan.report import number_format
from paragan.report.svg_plot import MAX_POINTS, Line, axis_limits, downsample_indices, make_chart, nice_ticks


def line(values, name="G"):
    return Line(name, list(range(len(values))), list(values), "g")


def test_thinning_keeps_ends_spikes_and_gaps():
    values = np.sin(np.arange(100_000.0))
    values[12_345], values[54_321], values[77_777] = 9, -9, np.nan
    displayed = downsample_indices(values)
    assert displayed.size <= MAX_POINTS
    assert {0, 12_345, 54_321, 77_777, 99_999} <= set(displayed)
    assert (np.diff(displayed) > 0).all()


def test_few_points_are_all_shown():
    assert (downsample_indices(np.zeros(MAX_POINTS)) == np.arange(MAX_POINTS)).all()


def test_one_explosion_does_not_flatten_the_curve():
    values = np.random.default_rng(0).normal(size=1000)
    values[500] = 1e9
    low, high = axis_limits(values)
    assert low < values.min()
    assert high < 20
    chart = make_chart("Losses", "", [line(values)])
    assert chart is not None
    assert chart.notes == ("1 of 1,000 beyond the axis",)


@pytest.mark.parametrize(
    ("values", "floor", "expected"),
    [
        ([5, 5], np.inf, (4.5, 5.5)),
        ([0, 0], np.inf, (-1, 1)),
        ([0, 100], np.inf, (-6, 106)),
        ([50, 100], 0, (0, 106)),
    ],
)
def test_limits(values, floor, expected):
    assert axis_limits(np.array(values, float), floor) == pytest.approx(expected)


@pytest.mark.parametrize("values", [[], [np.nan, np.inf], [1e300]])
def test_nothing_to_draw_is_no_chart(values):
    assert make_chart("Losses", "", [line(values)]) is None


def test_values_that_are_not_finite_are_counted_and_left_open():
    chart = make_chart("Losses", "", [line([1, np.nan, 2, np.inf, 3, 1e300, 4])])
    assert chart is not None
    assert chart.notes == ("2 of 7 not finite", "1 of 7 beyond the axis")


def test_tick_labels_are_exact():
    chart = make_chart("kid", "", [line([0, 0.1])])
    assert chart is not None
    labels = [
        float(text.replace(number_format.MINUS, "-")) for text in re.findall(r"<text[^>]*>([^<]+)</text>", chart.svg)
    ]
    heights = labels[-5:]
    assert heights == pytest.approx([0, 0.025, 0.05, 0.075, 0.1])


@pytest.mark.parametrize("span", [1e-300, 3e-9, 0.7, 1, 42, 1e29])
@pytest.mark.parametrize("low", [-1.3, 0, 0.9])
def test_ticks_are_few_and_within_the_axis(low, span):
    ticks = nice_ticks(low * span, (low + 1) * span, 5)
    assert 2 <= len(ticks) <= 6
    step = ticks[1] - ticks[0]
    assert np.diff(ticks) == pytest.approx(np.full(len(ticks) - 1, step))
    assert low * span - step / 1e6 <= ticks[0]
    assert ticks[-1] <= (low + 1) * span + step / 1e6


def test_a_line_is_drawn_where_its_values_are():
    chart = make_chart("Losses", "", [line([0, 100, np.nan, 50, np.nan, 0, 100])], 0)
    assert chart is not None
    (path,) = re.findall(r'<path d="(M[^"]*)" stroke="var\(--g\)"[^>]* stroke-width="1.4"', chart.svg)
    segments = [re.findall(r"[ML]([\d.]+) ([\d.]+)", text) for text in path.split("M")[1:] for text in ["M" + text]]
    assert [len(points) for points in segments] == [2, 1, 2]  # gaps, and a value alone between two
    (x0, bottom), (x1, top) = (tuple(map(float, point)) for point in segments[0])
    assert bottom > top  # y points downwards
    assert float(segments[1][0][1]) == pytest.approx((bottom + top) / 2, abs=0.02)
    assert float(segments[2][1][0]) - x0 == pytest.approx(6 * (x1 - x0), abs=0.1)


def test_a_drawing_is_an_element_of_its_page():
    svg = str(make_chart("Losses", "", [line(np.arange(900.0))], 0).svg)  # pyright: ignore
    assert svg == str(make_chart("Losses", "", [line(np.arange(900.0))], 0).svg)  # pyright: ignore
    assert "http" not in svg
    assert "font-family" not in svg
    assert not re.search("#[0-9a-f]{6}", svg)
    assert "var(--g)" in svg
    assert len(svg) < 20_000


def test_a_hostile_name_stays_text():
    chart = make_chart('"><script>', "", [line([1, 2])])
    assert chart is not None
    assert "<script>" not in chart.svg


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (42.13, "42.1 s"),
        (185, "3 min 5 s"),
        (3599.7, "1 h 0 min"),
        (7980, "2 h 13 min"),
        (372_000, "4 d 7 h"),
    ],
)
def test_durations(seconds, text):
    assert number_format.format_duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (7.4182, "7.418"),
        (0.00123, "0.00123"),
        (12345.6, "12,346"),
        (-2, "\N{MINUS SIGN}2"),
        (np.nan, "not finite"),
        (None, "not finite"),
    ],
)
def test_numbers(value, text):
    assert number_format.format_number(value) == text
