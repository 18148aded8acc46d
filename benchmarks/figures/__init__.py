"""The figures that README and docs state, and how each follows from a file in benchmarks/results/.

    python -m benchmarks.figures    # where documents and results differ, and numbers that nothing accounts for

A module belongs to a document. It holds functions that read results and yield statements: a piece of the document's
text with `{}` where a figure stands, and the figures, computed from the results. tests/test_figures.py renders every
statement and finds it in its document, so a figure cannot differ from its result. All other numbers of README's
"Measured" and of docs/measurements/ are settings, dates or arithmetic (SETTINGS in registry.py, `not_measured` of a
page: each with its reason), or their paragraph says that they were taken by hand.

To add a figure: commit the result, write the sentence, and yield it in the document's module with `{}` in place of the
figure. A new module needs to be named nowhere.
"""
