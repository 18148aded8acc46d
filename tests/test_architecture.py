"""The rules of the layout, as far as a program can check them. docs/design.md explains the packages.

Every failure names file and line. `python tests/code_metrics.py --list WHAT` prints the same findings in a shell.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from code_metrics import (
    PACKAGE,
    Finding,
    Module,
    absolute_imports,
    chained_conditionals,
    conditional_repetitions,
    duplicate_classes,
    duplicate_stems,
    forbidden_definitions,
    forbidden_fields,
    forbidden_words_in,
    import_cycles,
    internal_imports,
    load_modules,
    long_functions,
    misformed_messages,
    modules_without_docstring,
    private_imports,
    single_field_functions,
    strategy_queries,
    strategy_subclasses,
    strongly_connected,
    undocumented_interfaces,
    unlike_assignments,
)

ROOT = Path(__file__).resolve().parent.parent

# Package -> the packages that it may import beside itself, from the bottom to the top. A package never imports one
# that stands below it in this table. The two at the top, `cli` and `api`, may import all of them.
MAY_IMPORT: dict[str, set[str]] = {
    "core": set(),
    "report": {"core"},  # reads the files of run folders
    "eval": {"core"},
    "optim": {"core"},
    "losses": {"core"},
    "nets": {"core"},
    "data": {"core"},
    "comm": {"core"},
    "game": {"core", "comm"},
    "strategies": {"core", "comm", "game"},
    "config": {"core", "data", "nets", "losses", "optim", "game", "strategies"},
    "models": {"core", "data", "nets", "losses", "game", "config"},  # never train
    "train": {
        *{"core", "report", "eval", "optim", "losses", "nets", "data", "comm"},
        *{"game", "strategies", "config", "models"},
    },
    "watch": {"core", "report", "train"},
    "plan": {
        *{"core", "eval", "losses", "data", "comm"},
        *{"game", "strategies", "config", "train"},
    },
    "recipes": {"core", "nets", "losses", "optim", "game", "config"},
}
TOP = {"__init__", "__main__", "api", "cli"}  # whatever a user starts from; nothing else imports these

# Part of a package -> the other parts of the same package that it may import.
PARTS_MAY_IMPORT: dict[str, set[str]] = {
    "comm.compression": set(),
    "losses.augment": set(),
    "data.storage": {"data.source"},
    "data.formats": {"data.source", "data.decode", "data.storage"},
    "data.records": {
        *{"data.source", "data.decode", "data.streaming", "data.storage", "data.formats", "data.bad_samples"},
    },
    "data.loader": {
        *{"data.source", "data.decode", "data.value_range", "data.streaming", "data.storage", "data.formats"},
        "data.records",
    },
}

# Parts that are built upon the rest of their package, which therefore may not import them.
UPPER_PARTS = {"comm.elastic", "data.tools", "train.per_label"}

DISTRIBUTED = "paragan/comm/process_group.py"  # where torch.distributed is imported

DESIGN_WORDS = ("Game", "Player", "Turn", "Round", "Lane", "Exchange", "Role", "Objective")

# Folders of tests and benchmarks that are not named after a package.
TEST_FOLDERS = {"contracts", "engines", "oracles", "standin"}
BENCHMARK_FOLDERS = {"figures", "lib", "per_label", "quality", "resilience", "speed"}

# Fields of strategies that have another name now: one idea, one word.
FORMER_FIELDS = {
    "every": "sync_period",
    "local_steps": "sync_period",
    "exact": "paper_update",
    "rate": "consensus_rate",
    "lead": "max_lead_rounds",
    "within": "per_label_strategy",
    "rare": "rare_below",
    "share": "budget_by",
    "wait": "wait_for_all",
    "lost_after_s": "peer_timeout_s",
    "plain_descent": "requires_sgd",
}

MODULES = load_modules(ROOT)
INTERNAL = internal_imports(MODULES)
FILES = {module.name: module.file for module in MODULES}


def each_module(check: Callable[[Module], None]) -> Callable[[], None]:
    """Make one test of a check of a module, for all modules: a test for each would take longer than its check."""

    def check_all() -> None:
        failures: list[str] = []
        for module in MODULES:
            try:
                check(module)
            except pytest.fail.Exception as error:
                failures.append(str(error))
        if failures:
            pytest.fail("\n".join(failures), pytrace=False)

    return check_all


def package_of(name: str) -> str:
    """Return the package of a dotted module name; of `paragan` itself `__init__`."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def expect_none(findings: Iterable[Finding], rule: str) -> None:
    """Fail with the rule and every finding, a line each."""
    lines = [str(finding) for finding in findings]
    if lines:
        pytest.fail("\n".join([rule, *lines]), pytrace=False)


# Packages and imports ---------------------------------------------------------------------------------


def test_every_package_is_in_the_table():
    packages = {package_of(module.name) for module in MODULES}
    assert packages == set(MAY_IMPORT) | TOP
    files = {path.stem for path in (ROOT / PACKAGE).glob("*.py")}
    assert files == {"__init__", "__main__"}


def test_packages_have_an_order():
    order = list(MAY_IMPORT)
    for position, package in enumerate(order):
        above = MAY_IMPORT[package] - set(order[:position])
        assert not above, f"{package} may not import {sorted(above)}, which stand below it in MAY_IMPORT"


@each_module
def test_no_package_imports_one_above_it(module: Module):
    package = package_of(module.name)
    if package in TOP:
        return
    allowed = MAY_IMPORT.get(package, set()) | {package}
    findings = [
        Finding(module.file, entry.line, f"imports {entry.module}")
        for entry in INTERNAL
        if entry.importer == module.name and package_of(entry.module) not in allowed
    ]
    expect_none(findings, f"{package} may import {', '.join(sorted(allowed))}. Move the code down, or pass it in")


@each_module
def test_parts_of_a_package_have_an_order(module: Module):
    findings: list[Finding] = []
    for entry in INTERNAL:
        if entry.importer != module.name or package_of(entry.module) != package_of(module.name):
            continue
        for part, others in PARTS_MAY_IMPORT.items():
            if _is_inside(module.name, part) and not any(_is_inside(entry.module, p) for p in {part, *others}):
                findings.append(Finding(module.file, entry.line, f"{part} may not import {entry.module}"))
        for part in UPPER_PARTS:
            if _is_inside(entry.module, part) and not _is_inside(module.name, part):
                findings.append(Finding(module.file, entry.line, f"only other packages may import {entry.module}"))
    expect_none(findings, "See PARTS_MAY_IMPORT and UPPER_PARTS")


def test_parts_are_packages():
    for part in {*PARTS_MAY_IMPORT, *UPPER_PARTS}:
        assert f"{PACKAGE}.{part}" in FILES, f"{part} is not a package: correct the table"


def test_no_circle_of_imports():
    lines: list[str] = []
    for cycle in import_cycles(MODULES, lazy=True, type_checking=True):
        lines.append(f"circle of {len(cycle)} modules:")
        entries = [entry for entry in INTERNAL if entry.importer in cycle and entry.module in cycle]
        places = [f"  {FILES[entry.importer]}:{entry.line}: imports {entry.module}" for entry in entries]
        lines += dict.fromkeys(places)
    if lines:
        pytest.fail("\n".join(lines), pytrace=False)


def test_components_of_a_graph():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": set()}
    assert sorted(map(sorted, strongly_connected(graph))) == [["a", "b", "c"], ["d"], ["e"]]


def test_no_private_name_of_another_module():
    expect_none(private_imports(MODULES), "Make the name public, or move it to where it is used")


# Names ------------------------------------------------------------------------------------------------


def test_no_class_name_twice():
    doubles = [place for places in duplicate_classes(MODULES).values() for place in places]
    expect_none(doubles, "Make one class of them, or name them by what differs")


def test_no_module_stem_twice():
    stems = duplicate_stems(MODULES)
    assert not stems, "\n".join(f"{stem}: {', '.join(files)}" for stem, files in stems.items())


@each_module
def test_no_forbidden_name(module: Module):
    expect_none(forbidden_definitions([module]), "Use a standard term (FORBIDDEN_WORDS in code_metrics.py)")


@each_module
def test_no_forbidden_field_or_parameter(module: Module):
    expect_none(forbidden_fields([module]), "Use a standard term (FORBIDDEN_WORDS in code_metrics.py)")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("told_bytes", ["told"]),
        ("HandBatch", ["hand"]),
        ("_look_on", ["look"]),
        ("handle_lookup", []),
        ("NotFoundError", []),
        ("LookAhead", []),
        ("TensorBoardLog", []),
        ("wellformed", []),
    ],
)
def test_words_of_a_name(name: str, words: list[str]):
    assert forbidden_words_in(name) == words


def test_glossary_explains_the_words_of_the_design():
    text = (ROOT / "docs" / "glossary.md").read_text("utf-8")
    missing = [word for word in DESIGN_WORDS if not re.search(rf"^\W*{word}\b", text, re.MULTILINE)]
    assert not missing, f"docs/glossary.md has no line that begins with {', '.join(missing)}"


# Strategies -------------------------------------------------------------------------------------------


def test_strategies_are_not_identified_by_type_or_name():
    expect_none(strategy_queries(MODULES), "Give the strategy a property or method that answers, and ask it")


def test_presets_are_data():
    expect_none(strategy_subclasses(MODULES), "A preset is a row of the table of presets, not a subclass")


@each_module
def test_one_name_for_one_field(module: Module):
    if package_of(module.name) != "strategies":
        return
    findings = [
        Finding(module.file, part.lineno, f"{part.target.id} is named {FORMER_FIELDS[part.target.id]}")
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ClassDef) and node.name != "Role"  # a role is no configuration
        for part in node.body
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name) and part.target.id in FORMER_FIELDS
    ]
    expect_none(findings, "One idea, one word")


# Density and docstrings -------------------------------------------------------------------------------


@each_module
def test_one_assignment_a_line(module: Module):
    expect_none(unlike_assignments([module]), "Assign unrelated values one a line")


@each_module
def test_no_chained_conditional_expression(module: Module):
    expect_none(chained_conditionals([module]), "Use if statements")


@each_module
def test_no_sequence_multiplied_by_a_condition(module: Module):
    expect_none(conditional_repetitions([module]), "Use an if statement")


@each_module
def test_no_long_function(module: Module):
    expect_none(long_functions([module]), "Split it where a part has a name of its own")


@each_module
def test_modules_have_a_docstring(module: Module):
    expect_none(modules_without_docstring([module]), "Say what the module holds")


@each_module
def test_error_messages_have_one_form(module: Module):
    expect_none(misformed_messages([module]), "Write `field=value: what is wrong. Use X or Y.`")


def test_what_other_packages_call_has_a_docstring():
    expect_none(undocumented_interfaces(MODULES), "Document arguments, shapes, errors and source")


@each_module
def test_functions_get_only_the_section_used(module: Module):
    expect_none(single_field_functions([module]), "Pass that section instead of the run")


# Imports and effects -----------------------------------------------------------------------------------


@each_module
def test_torch_distributed_is_imported_in_one_module(module: Module):
    if module.file == DISTRIBUTED:
        return
    findings = [
        Finding(module.file, entry.line, f"imports {entry.module} {entry.name}")
        for entry in absolute_imports(module)
        if f"{entry.module}.{entry.name}.".startswith("torch.distributed.")
    ]
    expect_none(findings, f"Only {DISTRIBUTED} imports torch.distributed; use its c10d")


@each_module
def test_no_import_can_run_code_from_files(module: Module):
    findings: list[Finding] = []
    for entry in absolute_imports(module):
        root = entry.module.partition(".")[0]
        allowed = root == "pickle" and entry.name in ("", "UnpicklingError")  # the error of torch's safe reader
        if root in ("pickle", "dill", "cloudpickle", "torchvision") and not allowed:
            findings.append(Finding(module.file, entry.line, f"imports {entry.module} {entry.name}"))
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "pickle":
            if node.attr != "UnpicklingError":
                findings.append(Finding(module.file, node.lineno, f"uses pickle.{node.attr}"))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
            keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            if keywords.get("weights_only") != "True":
                findings.append(Finding(module.file, node.lineno, "torch.load without weights_only=True"))
    expect_none(findings, "Files are data: no pickle is loaded")


@each_module
def test_no_step_waits_for_the_device_by_accident(module: Module):
    if package_of(module.name) in ("game", "losses", "optim"):
        lines = enumerate(module.source.splitlines(), 1)
        findings = [Finding(module.file, number, line.strip()) for number, line in lines if ".item()" in line]
        expect_none(findings, "Sums stay on the device: `.item()` waits for it")


# What stands in strings, in folders and in documents --------------------------------------------------


@each_module
def test_dotted_paths_in_strings_exist(module: Module):
    findings: list[Finding] = []
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            for path in re.findall(rf"\b{PACKAGE}(?:\.[A-Za-z_]\w*)+", node.value):
                if not _exists(path):
                    findings.append(Finding(module.file, node.lineno, f"there is no {path}"))
    expect_none(findings, "Follow the move")


def test_the_program_of_pyproject_exists():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    program = settings["project"]["scripts"]["paragan"]
    assert _exists(program.replace(":", ".")), f"there is no {program}"
    for pattern in settings["tool"]["setuptools"]["package-data"]["paragan"]:
        assert list((ROOT / PACKAGE).glob(pattern)), f"package-data: nothing matches {pattern}"


def test_tests_and_benchmarks_mirror_the_packages():
    packages = set(MAY_IMPORT) | {"api", "cli"}
    tests = _folders(ROOT / "tests")
    assert tests <= packages | TEST_FOLDERS, f"tests/ has folders of no package: {tests - packages - TEST_FOLDERS}"
    benchmarks = _folders(ROOT / "benchmarks")
    others = benchmarks - packages - BENCHMARK_FOLDERS
    assert not others, f"benchmarks/ has folders of no package: {others}"


def _documents() -> list[Path]:
    """Return the documents, and the benchmarks and examples, whose docstrings say how to run them."""
    folders = (("docs", "*.md"), ("benchmarks", "*.py"), ("examples", "*.py"))
    files = [path for folder, pattern in folders for path in sorted((ROOT / folder).rglob(pattern))]
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *files]


@pytest.mark.parametrize("document", _documents(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_files_named_in_documents_exist(document: Path):
    """Paths such as `comm/exchange.py`, from the root, the package, tests/ or the document, and `-m benchmarks.x`."""
    bases = [ROOT, ROOT / PACKAGE, ROOT / "tests", document.parent]
    findings: list[Finding] = []
    for number, line in enumerate(document.read_text("utf-8").splitlines(), 1):
        for path in re.findall(r"(?<![\w/.:*-])(?:[\w.-]+/)+[\w-]+\.(?:py|md|c|html)\b", line):
            known = {folder.name for base in bases for folder in base.iterdir() if folder.is_dir()}
            if path.partition("/")[0] in known and not any((base / path).exists() for base in bases):
                findings.append(Finding(document.relative_to(ROOT).as_posix(), number, f"there is no {path}"))
        for name in re.findall(r"-m ((?:benchmarks|examples)(?:\.\w+)+)", line):
            module = ROOT / name.replace(".", "/")
            if not (module.with_suffix(".py").is_file() or (module / "__main__.py").is_file()):
                findings.append(Finding(document.relative_to(ROOT).as_posix(), number, f"there is no module {name}"))
    expect_none(findings, "Follow the move")


def _folders(folder: Path) -> set[str]:
    """Return the names of the folders in it that hold Python files."""
    return {path.name for path in folder.iterdir() if path.is_dir() and any(path.rglob("*.py"))}


def _is_inside(name: str, part: str) -> bool:
    return f"{name}.".startswith(f"{PACKAGE}.{part}.")


def _exists(path: str) -> bool:
    """Return whether a dotted path is a module, or a name that its module defines or imports."""
    if path in FILES:
        return True
    owner, _, name = path.rpartition(".")
    return name in NAMES.get(owner, ()) or (owner != PACKAGE and owner.startswith(PACKAGE) and _exists(owner))


def _names_of(module: Module) -> set[str]:
    """Return the names that a module defines at its top, imports, or lists in strings (`__all__`)."""
    names = {entry.alias for entry in absolute_imports(module)}
    for node in module.tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        names |= {part.id for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)}
    return names


NAMES: dict[str, set[str]] = defaultdict(set, {module.name: _names_of(module) for module in MODULES})
