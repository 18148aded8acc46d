import math

import pytest

from advice import Case, advises, case_id
from paragan.core.errors import UsageError
from paragan.plan.links import (
    Link,
    format_rate,
    links_to_yaml,
    load_links,
    parse_duration,
    parse_links,
    parse_rate,
    read_links,
)

BY_HAND = """
hosts: 4
up: 200 Mbit/s
down: [200 Mbit/s, 200 Mbit/s, 100 Mbit/s, 1 Gbit/s]
latency: 10 ms
intra_host: 3 GB/s, 20 us
duplex_efficiency: 0.98
initial_window_bytes: 14480
pairs: {0-3: "20 Mbit/s, 40 ms"}
"""


def written(tmp_path, text):
    path = tmp_path / "links.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "bytes_a_second"),
    [("25 Gbit/s", 3.125e9), ("200Mbit/s", 25e6), ("3 GB/s", 3e9), ("512 kB/s", 512e3), ("1e3 bit/s", 125), (7, 7)],
)
def test_rates_have_units(text, bytes_a_second):
    assert parse_rate(text) == pytest.approx(bytes_a_second)
    assert parse_rate(format_rate(parse_rate(text))) == pytest.approx(bytes_a_second, rel=1e-3)


def test_durations_have_units():
    assert [parse_duration(text) for text in ("50 us", "10ms", "0 s", 0.5)] == [pytest.approx(5e-5), 0.01, 0, 0.5]


def test_a_line_describes_equal_hosts():
    links = parse_links("8 hosts of 4 ranks, 25 Gbit/s, 50 us")
    assert (links.hosts, links.ranks) == (8, 32)
    assert links.link_between(0, 7) == Link(3.125e9, pytest.approx(5e-5))
    assert links.describe() == "8 hosts of 4 ranks, 25 Gbit/s, 50 us"


def test_home_links_have_two_rates():
    links = parse_links("100000 hosts, 100/20 Mbit/s, 40 ms")
    assert links.port_rates(99_999) == (2.5e6, 12.5e6)
    assert links.link_between(5, 6) == Link(2.5e6, pytest.approx(0.04))


def test_a_handwritten_links_file(tmp_path):
    links = read_links(written(tmp_path, BY_HAND))
    assert links.link_between(0, 1) == Link(25e6, 0.01)
    assert links.link_between(1, 2) == Link(12.5e6, 0.01)  # as fast as the slower port
    assert links.link_between(3, 0) == links.link_between(0, 3) == Link(2.5e6, 0.04)
    assert links.link_between(2, 2) == Link(3e9, pytest.approx(2e-5))


def test_links_round_trip(tmp_path):
    links = read_links(written(tmp_path, BY_HAND))
    repeated = read_links(written(tmp_path, links_to_yaml(links)))
    for a in range(4):
        for b in range(4):
            one, other = links.link_between(a, b), repeated.link_between(a, b)
            assert math.isclose(one.bandwidth, other.bandwidth, rel_tol=1e-3)
            assert math.isclose(one.latency, other.latency, rel_tol=1e-3)
    assert (repeated.duplex_efficiency, repeated.contention_efficiency, repeated.initial_window_bytes) == (
        0.98,
        1.0,
        14480,
    )


def test_links_from_pairs_only(tmp_path):
    pairs = 'hosts: 3\npairs: {0-1: "1 Gbit/s, 1 ms", 0-2: "1 Gbit/s, 2 ms", 1-2: "1 Gbit/s, 3 ms"}'
    assert read_links(written(tmp_path, pairs)).link_between(2, 1) == Link(125e6, 0.003)


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        ("hosts: 2\nup: -3 Mbit/s\nlatency: 1 ms", "a rate must be above 0"),
        ("hosts: 2\nup: .nan\nlatency: 1 ms", "finite number"),
        ("hosts: 2\nup: 1 Gbit/s\nlatency: -1 ms", "a latency must be from 0"),
        ("hosts: 0\nup: 1 Gbit/s\nlatency: 1 ms", "hosts=0"),
        ("hosts: 2\nup: 1 Gbit/s\nlatency: 1 ms\ncontention_efficiency: 1.5", "contention_efficiency=1.5"),
        ("hosts: 2\nup: 1 Gbit/s\nlatency: 1 ms\nbandwith: 3", "no field bandwith"),
        ("hosts: 2\nup: 1 Gbit/s\nlatency: 1 ms\npairs: {00-1: '1 Gbit/s, 1 ms'}", "'00-1'"),
        ("- 1", "must hold fields"),
        (f"hosts: 2\nup: {'9' * 400}\nlatency: 1 ms", "a rate must be above 0"),
    ],
)
def test_a_bad_file_is_one_line_that_names_the_field(tmp_path, text, reported):
    with pytest.raises(UsageError) as caught:
        read_links(written(tmp_path, text))
    assert reported in str(caught.value)
    assert "links.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)


PAIRS = "hosts: 3\npairs: {0-1: '1 Gbit/s, 1 ms', 1-2: '1 Gbit/s, 1 ms'}\n"
FILES = [  # their text, and other texts instead of it
    Case(
        "hosts: 2\nup: 3 parsec\nlatency: 1 ms",
        "a rate must be above 0 and have a unit. Use 25 Gbit/s, 200 Mbit/s or 3 GB/s",
        tuple(f"hosts: 2\nup: {rate}\nlatency: 1 ms" for rate in ("25 Gbit/s", "200 Mbit/s", "3 GB/s")),
    ),
    Case(
        "hosts: 2\nup: 1 Gbit/s\nlatency: 3 weeks",
        "a latency must be from 0 to 600 s and have a unit. Use 50 us or 10 ms",
        ("hosts: 2\nup: 1 Gbit/s\nlatency: 50 us", "hosts: 2\nup: 1 Gbit/s\nlatency: 10 ms"),
    ),
    Case(
        "hosts: 2\nup: 1 Gbit/s\nlatency: 1 ms\nintra_host: 3 GB/s",
        "a link is a rate and a latency. Use '25 Gbit/s, 50 us'",
        ("hosts: 2\nup: 1 Gbit/s\nlatency: 1 ms\nintra_host: '25 Gbit/s, 50 us'",),
    ),
    Case(
        "hosts: 3\nup: 1 Gbit/s\nlatency: 1 ms\npairs: {2-0: '1 Gbit/s, 1 ms'}",
        "pairs has '2-0', which is no pair of hosts. Use 0-1 to 1-2, the smaller host first",
        tuple(f"hosts: 3\nup: 1 Gbit/s\nlatency: 1 ms\npairs: {{{pair}: '1 Gbit/s, 1 ms'}}" for pair in ("0-1", "1-2")),
    ),
    Case(
        "hosts: 2\nup: [1 Gbit/s]\nlatency: 1 ms",
        "up has 1 rates for 2 hosts. Use one rate, or one per host",
        ("hosts: 2\nup: 1 Gbit/s\nlatency: 1 ms", "hosts: 2\nup: [1 Gbit/s, 2 Gbit/s]\nlatency: 1 ms"),
    ),
    Case(
        PAIRS,
        "pairs lacks 0-2. Add it, or give up and latency for pairs without an entry",
        (PAIRS.replace("}", ", 0-2: '1 Gbit/s, 1 ms'}"), f"{PAIRS}up: 1 Gbit/s\nlatency: 1 ms"),
    ),
]


@pytest.mark.parametrize("case", FILES, ids=case_id)
def test_advice_on_a_file_works(case, tmp_path):
    with advises(case.advice):
        read_links(written(tmp_path, case.arguments))
    for text in case.follow:
        assert read_links(written(tmp_path, text)).hosts in (2, 3)


def test_neither_a_file_nor_a_line(tmp_path):
    with pytest.raises(UsageError, match="8 hosts, 25 Gbit/s, 50 us"):
        load_links("eight hosts")
    with pytest.raises(UsageError, match="8 hosts, 25 Gbit/s, 50 us"):
        load_links("9" * 5000 + " hosts, 1 Gbit/s, 1 ms")
    with pytest.raises(UsageError, match="paragan bench links --out"):
        load_links(str(tmp_path / "none.yaml"))
