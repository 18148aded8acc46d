"""Figures in the documents are those of benchmarks/results/: benchmarks/figures/ says which is which."""

from __future__ import annotations

import json
import re
from importlib import import_module

import pytest

from benchmarks import results_table
from benchmarks.figures import registry
from benchmarks.figures.registry import MEASUREMENTS, OTHER_DOCUMENTS, Page, Source, fill_in, load_pages
from benchmarks.lib.document import ROOT, Document

PAGES = load_pages()
SOURCES = [(page, source) for page in PAGES.values() for source in page.sources]
NAMES = [f"{page.path}: {source.statements.__name__}" for page, source in SOURCES]
by_page = pytest.mark.parametrize("page", [PAGES[path] for path in MEASUREMENTS], ids=MEASUREMENTS)
by_other_page = pytest.mark.parametrize("page", [PAGES[path] for path in OTHER_DOCUMENTS], ids=OTHER_DOCUMENTS)


@pytest.mark.parametrize(("page", "source"), SOURCES, ids=NAMES)
def test_documents_say_what_results_say(page: Page, source: Source):
    missing = page.read().find_missing(source.sentences())
    assert not missing, "\n".join([f"{page.path} should say:", *missing])


@by_page
def test_every_number_is_a_result_or_has_a_reason(page: Page):
    uncovered = page.find_uncovered(page.read())
    advice = "State these in the module of the page in benchmarks/figures/, or say there why not:"
    assert not uncovered, "\n".join([advice, *uncovered])


@by_other_page
def test_measurements_in_other_pages_are_results(page: Page):
    document = page.read()
    found = document.find_measurements(page.sentences())
    assert not found, f"{page.path}: state {found} in benchmarks/figures/"


@by_other_page
def test_other_pages_name_their_results_or_the_page_that_does(page: Page):
    linked = re.findall(r"\]\((measurements/\w+\.md)\)", page.read().text)
    texts = [page.read().text, *(PAGES[f"docs/{link}"].read().text for link in linked if "README" not in link)]
    missing = {f"{name}.json" for source in page.sources for name in source.results}
    missing -= {name for name in missing for text in texts if name in text}
    assert not missing, f"{page.path} names no {sorted(missing)}"


@by_page
def test_exceptions_are_still_in_their_page(page: Page):
    text = page.read().text
    assert not [sentence for sentence in page.not_measured if sentence not in text]


def test_every_module_of_figures_belongs_to_a_document():
    for path in (ROOT / "benchmarks/figures").glob("[a-z]*.py"):
        module = import_module(f"benchmarks.figures.{path.stem}")
        pages = [page for page in vars(module).values() if isinstance(page, Page)]
        assert pages or module is registry, f"{path.name} has no page"
        assert all(PAGES[page.path] is page and page.read().text for page in pages)


@by_page
def test_pages_name_command_result_and_machine(page: Page):
    text = page.read().text
    missing = set()
    for name in {name for source in page.sources for name in source.results}:
        machine = results_table.machine_of(results_table.read_result(name))
        module = results_table.COMMANDS[name].split()[0]
        wanted = {rf"(?<!\w){name}\.json", rf"-m benchmarks\.{module}\b"}
        if machine:
            wanted |= {results_table.name_machine(machine), "torch " + machine["torch"].rpartition(".")[0]}
        missing |= {pattern for pattern in wanted if not re.search(pattern, text)}
    assert not missing, f"{page.path} does not name {sorted(missing)}"


def test_every_result_has_its_command_and_machine_in_the_table():
    table = list(results_table.format_rows())
    page = (ROOT / "docs/measurements/README.md").read_text("utf-8")
    assert "\n".join(table) + "\n" == page[page.index(table[0]) :], "python -m benchmarks.results_table prints it"


def test_results_hold_no_path_of_a_machine():
    results = (ROOT / "benchmarks/results").glob("*.json")
    assert not [path.name for path in results if re.search(r"=/\w|\"/\w", path.read_text("utf-8"))]


def test_every_command_exists():
    for command in results_table.COMMANDS.values():
        module = command.split()[0].replace(".", "/") + ".py"
        assert (ROOT / "benchmarks" / module).is_file(), command


def test_a_changed_figure_is_found():
    page = PAGES["docs/measurements/weak_scaling.md"]
    document = page.read()
    changed = Document(document.source.replace("| 5 % | 0.99 | 0.98 | 0.96 |", "| 5 % | 0.99 | 0.98 | 0.97 |"))
    assert changed != document
    (missing,) = changed.find_missing(page.sentences())
    assert "0.96" in missing
    assert any("[0.97]" in number for number in page.find_uncovered(changed))


def test_a_changed_result_is_found(monkeypatch: pytest.MonkeyPatch):
    page, source = next((page, source) for page, source in SOURCES if source.results == ("wires",))
    result = json.dumps(results_table.read_result("wires")).replace("1.77", "1.67")
    monkeypatch.setattr(registry, "read_result", lambda name: json.loads(result))
    assert page.read().find_missing(source.sentences())


def test_numbers_that_nothing_covers():
    document = Document(
        "## Speed 1\n\n| what | 1 ms |\n|---|---|\n| it | 12.5 |\n\nA step takes 3 ms, `8` times, 7 % less.\n\n"
        "* 5 ms\n\n| what |\n|---|\n| 9 |\n"
    )
    found = [re.search(r"\[(.*)\]", number) for number in document.find_uncovered(["takes 3 ms"])]
    assert [match[1] for match in found if match] == ["12.5", "7", "5", "9"]


def test_a_statement_has_as_many_figures_as_places():
    with pytest.raises(ValueError, match="1 figures for 2 places"):
        fill_in("{} and {}", [1])
    with pytest.raises(ValueError, match="0 figures for 0 places"):
        fill_in("no figure", [])
