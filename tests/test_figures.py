"""Figures in the documents are those of benchmarks/results/ (benchmarks/figures.py says which is which)."""

from __future__ import annotations

import json
import re

import pytest

from benchmarks import figures

by_page = pytest.mark.parametrize("page", figures.PAGES)


@pytest.mark.parametrize("source", figures.SOURCES, ids=lambda source: source.statements.__name__)
def test_documents_say_what_results_say(source: figures.Source):
    differences = figures.find_differences(source)
    assert not differences, "\n".join([source.page, *differences])


@by_page
def test_every_number_is_a_result_or_has_a_reason(page: str):
    uncovered = figures.find_uncovered(page)
    assert not uncovered, "\n".join(["State these in benchmarks/figures.py, or say there why not:", *uncovered])


@pytest.mark.parametrize("page", figures.OTHER_PAGES)
def test_measurements_in_other_pages_are_results_or_say_by_hand(page: str):
    assert not figures.find_unmarked(page), f"{page}: state them in benchmarks/figures.py, or say: {figures.BY_HAND}"


@by_page
def test_exceptions_are_still_in_their_page(page: str):
    text = figures.one_line(figures.read_page(page))
    assert not [sentence for sentence in figures.NOT_MEASURED.get(page, ()) if sentence not in text]


@by_page
def test_pages_name_results_and_machines(page: str):
    text = figures.one_line(figures.read_page(page))
    missing = set()
    for source in figures.SOURCES:
        for name in source.results if source.page == page else ():
            result = figures.read_result(name)
            machine = figures.name_machine(result)
            named = {rf"(?<!\w){name}\.json"}
            if machine != figures.NOT_RECORDED:
                named |= {machine, "torch " + result["machine"]["torch"].rpartition(".")[0]}
            missing.update(word for word in named if not re.search(word, text))
    assert not missing, f"{page} does not name {sorted(missing)}"


def test_every_result_has_its_command_and_machine_in_the_table():
    table = figures.format_machines()
    lines = (figures.MEASUREMENTS / "README.md").read_text("utf-8").splitlines()
    assert [line for line in table if line not in lines] == [], "python -m benchmarks.figures machines prints the table"
    assert [line for line in lines if line.startswith("| `") and line not in table] == []


def test_every_command_exists():
    for command in figures.COMMANDS.values():
        module = figures.ROOT / "benchmarks" / (command.split()[0].rstrip(",").replace(".", "/") + ".py")
        assert module.is_file(), command


def test_a_changed_figure_is_found(monkeypatch: pytest.MonkeyPatch):
    source = next(source for source in figures.SOURCES if source.statements.__name__ == "scaling_of_the_paper")
    page = figures.read_page(source.page)
    changed = page.replace("| 5 % | 0.99 | 0.98 | 0.96 | 0.95 |", "| 5 % | 0.99 | 0.98 | 0.97 | 0.95 |")
    assert changed != page
    monkeypatch.setattr(figures, "read_page", lambda page: changed)
    (difference,) = figures.find_differences(source)
    assert "0.96" in difference
    assert len(figures.find_uncovered(source.page)) == 5


def test_a_figure_without_a_result_is_found(monkeypatch: pytest.MonkeyPatch):
    table = "## Speed 1\n\n| what | 1 ms |\n|---|---|\n| it | 12.5 |\n\n"
    text = table + "A step takes 3 ms, 7 % less.\n\nIt takes 4 ms (by hand, no json).\n"
    monkeypatch.setattr(figures, "read_page", lambda page: text)
    found = [re.search(r"\[(.*)\]", number) for number in figures.find_uncovered("README.md")]
    assert [match[1] for match in found if match] == ["12.5", "3", "7"]


def test_a_changed_result_is_found(monkeypatch: pytest.MonkeyPatch):
    source = next(source for source in figures.SOURCES if source.statements.__name__ == "coding")
    result = json.dumps(figures.read_result("wires")).replace("1.77", "1.67")
    monkeypatch.setattr(figures, "read_result", lambda name: json.loads(result))
    assert figures.find_differences(source)
