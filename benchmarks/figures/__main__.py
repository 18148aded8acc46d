"""Print where documents and results differ, and numbers that nothing accounts for: `python -m benchmarks.figures`."""

from __future__ import annotations

from benchmarks.figures.registry import MEASUREMENTS, OTHER_DOCUMENTS, load_pages


def main() -> None:
    pages = load_pages()
    for page in pages.values():
        for source in page.sources:
            for sentence in page.read().find_missing(source.sentences()):
                print(f"{page.path} ({source.statements.__name__}): {sentence}")
    for path in MEASUREMENTS:
        for number in pages[path].find_uncovered(pages[path].read()):
            print(f"{path}: nothing accounts for {number}")
    for path in OTHER_DOCUMENTS:
        for measurement in pages[path].read().find_measurements(pages[path].sentences()):
            print(f"{path}: looks measured: {measurement}")


if __name__ == "__main__":
    main()
