"""Count what the rules of the layout are about: modules, import cycles, names, dense expressions, docstrings, words.

    python tests/code_metrics.py                      # this checkout
    python tests/code_metrics.py ../base . --json     # two checkouts: before and after

Source is parsed, never imported, so that any checkout can be read, with the standard library alone. The functions below
take the modules that `load_modules` returns and list `Finding`s, each with its file and line; `test_architecture.py`
uses the same functions and fails where a rule allows none.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import io
import json
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

AnyFunction = ast.FunctionDef | ast.AsyncFunctionDef

PACKAGE = "paragan"
MAX_FUNCTION_LINES = 60

# Words of the former vocabulary. A name may not contain one of them as a whole word of its snake_case or CamelCase
# spelling. Words that are also standard terms, or plain in any name, are left out: `post_step`, `UndoWrites`, `newest`.
FORBIDDEN_WORDS = frozenset(
    """
    told untold foretold tell tells telling seen unseen see found made given give gives gave kept keep keeps
    there here everywhere anywhere look looks looked settle settles settled
    meet meets met meeting knock knocks board desk door seat seats seated sit stand standing standin
    hand hands handed well heed unheeded glance whole anew aside beside apart alike alone together among
    nobody nothing somebody anybody thing things again ahead luck got gots mates kin crew crowd crowds people
    foresee foreseen imagined happening spoken speak speaker speakers say says said unsaid heard unheard hear hears
    owed posts posted parcel mail news pen noted noting rehearsal uncomputed unwritten undisturbed
    ask asks asked asking begun began came go took taken arrived arriving dealt deal drawn died
    judge judged judging verdict refuse refused refusal prove proved tried exhibit exhibits promise promised
    wanted leavable restless faithful inert cures vain misfit beat beats dice chosen stated
    laid lay rising falling shown unmapped passed moved own ours theirs calm meanwhile travelling why
    how way they them nearby far hung mend won finalists watchers welcome chance stays offer
    """.split()  # noqa: SIM905
)

# Functions that are only understood together with what they are called on: `of_rows`, `at_rate`.
FORBIDDEN_PREFIXES = ("of_", "at_")

# Standard terms that contain a forbidden word.
ALLOWED_TERMS = frozenset({"not_found", "look_ahead", "tensor_board"})

# A stem that occurs twice says nothing of the rest of its path; these do by convention.
SHARED_STEMS = frozenset({"__init__", "__main__"})


@dataclasses.dataclass(frozen=True)
class Module:
    """One parsed source file of the package."""

    file: str  # path relative to the checkout, with forward slashes
    name: str  # dotted, `paragan.comm.world`; an `__init__.py` has the name of its package
    source: str
    tree: ast.Module

    @property
    def is_package(self) -> bool:
        return self.file.endswith("/__init__.py")

    @property
    def stem(self) -> str:
        return Path(self.file).stem


@dataclasses.dataclass(frozen=True, order=True)
class Finding:
    """Something counted, and where it stands."""

    file: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}"


@dataclasses.dataclass(frozen=True, order=True)
class Import:
    """An import of a module, or of a name in it."""

    importer: str  # dotted name of a module
    module: str  # dotted name of the module that is imported
    name: str  # the name taken from it; "" where the module itself is imported
    alias: str  # the name that it has in the importer
    line: int
    lazy: bool  # inside a function: it runs at the call, not when the importer is loaded
    type_checking: bool  # under `if TYPE_CHECKING`: it never runs


def load_modules(root: Path, package: str = PACKAGE) -> list[Module]:
    """Parse every module of `package` in the checkout `root`, sorted by path.

    Raises:
        FileNotFoundError: `root` holds no such package.
    """
    folder = root / package
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such package. Give the root of a checkout")
    modules: list[Module] = []
    for path in sorted(folder.rglob("*.py")):
        relative = path.relative_to(root)
        parts = relative.with_suffix("").parts
        if parts[-1] == "__init__":
            parts = parts[:-1]
        source = path.read_text("utf-8")
        modules.append(Module(relative.as_posix(), ".".join(parts), source, ast.parse(source)))
    return modules


# Lines ------------------------------------------------------------------------------------------------


def count_lines(modules: Iterable[Module]) -> int:
    """Count all lines, blank ones included."""
    return sum(len(module.source.splitlines()) for module in modules)


def count_code_lines(modules: Iterable[Module]) -> int:
    """Count the lines that hold code: neither blank, nor only a comment, nor part of a docstring."""
    total = 0
    ignored = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    for module in modules:
        lines: set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(module.source).readline):
            if token.type not in ignored:
                lines.update(range(token.start[0], token.end[0] + 1))
        for node in ast.walk(module.tree):
            value = node.value if isinstance(node, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                lines.difference_update(range(value.lineno, (value.end_lineno or value.lineno) + 1))
        total += len(lines)
    return total


def long_functions(modules: Iterable[Module], limit: int = MAX_FUNCTION_LINES) -> list[Finding]:
    """List the functions of more than `limit` lines, from `def` to the last statement."""
    findings: list[Finding] = []
    for module, node in _functions(modules):
        lines = _function_lines(node)
        if lines > limit:
            findings.append(Finding(module.file, node.lineno, f"{node.name} has {lines} lines"))
    return findings


def _function_lines(node: AnyFunction) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def count_words(paths: Iterable[Path]) -> int:
    """Count the words of text files, as `wc -w` does."""
    return sum(len(path.read_text("utf-8").split()) for path in paths)


# Imports ----------------------------------------------------------------------------------------------


def absolute_imports(module: Module) -> Iterator[Import]:
    """Yield every import of a module, of other packages too, with relative names resolved."""
    package = module.name.split(".")
    if not module.is_package:
        package = package[:-1]
    for node, lazy, type_checking in _import_statements(module.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                local = alias.asname or alias.name.partition(".")[0]
                yield Import(module.name, alias.name, "", local, node.lineno, lazy, type_checking)
            continue
        parents = package[: len(package) - node.level + 1] if node.level else []
        target = ".".join([*parents, *([node.module] if node.module else [])])
        for alias in node.names:
            local = alias.asname or alias.name
            yield Import(module.name, target, alias.name, local, node.lineno, lazy, type_checking)


def internal_imports(modules: Sequence[Module]) -> list[Import]:
    """List the imports between modules of the package.

    `from package import submodule` counts as an import of the submodule. That a submodule also runs the `__init__` of
    its package is not counted.
    """
    names = {module.name for module in modules}
    imports: list[Import] = []
    for module in modules:
        for entry in absolute_imports(module):
            if entry.name and f"{entry.module}.{entry.name}" in names:
                entry = dataclasses.replace(entry, module=f"{entry.module}.{entry.name}", name="")
            if entry.module in names and entry.module != module.name:
                imports.append(entry)
    return imports


def import_cycles(modules: Sequence[Module], lazy: bool = False, type_checking: bool = False) -> list[list[str]]:
    """List the circles of imports: the strongly connected components of more than one module, largest first.

    Args:
        modules: the modules of the package.
        lazy: follow imports inside functions too.
        type_checking: follow imports under `if TYPE_CHECKING` too.
    """
    graph: dict[str, set[str]] = {module.name: set() for module in modules}
    for entry in internal_imports(modules):
        if (lazy or not entry.lazy) and (type_checking or not entry.type_checking):
            graph[entry.importer].add(entry.module)
    components = [sorted(component) for component in strongly_connected(graph) if len(component) > 1]
    return sorted(components, key=lambda component: (-len(component), component))


def private_imports(modules: Sequence[Module]) -> list[Finding]:
    """List the uses of another module's `_private` names: imported by name, or read from an imported module."""
    files = {module.name: module.file for module in modules}
    findings: list[Finding] = []
    aliases: dict[str, dict[str, str]] = defaultdict(dict)
    for entry in internal_imports(modules):
        hidden = [part for part in (*entry.module.split("."), entry.name) if _is_private(part)]
        if hidden:
            target = f"{entry.module}.{entry.name}".rstrip(".")
            findings.append(Finding(files[entry.importer], entry.line, f"imports {target}"))
        if not entry.name:
            aliases[entry.importer][entry.alias] = entry.module
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and _is_private(node.attr):
                owner = aliases[module.name].get(node.value.id)
                if owner:
                    findings.append(Finding(module.file, node.lineno, f"reads {owner}.{node.attr}"))
    return sorted(findings)


def strongly_connected(graph: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Return the strongly connected components of a graph (Tarjan's algorithm, without recursion)."""
    index: dict[str, int] = {}
    lowest: dict[str, int] = {}
    on_stack: set[str] = set()
    stack: list[str] = []
    components: list[list[str]] = []
    for root in graph:
        if root in index:
            continue
        pending: list[tuple[str, Iterator[str]]] = []
        _enter(root, graph, index, lowest, stack, on_stack, pending)
        while pending:
            node, successors = pending[-1]
            successor = next(successors, None)
            if successor is None:
                pending.pop()
                if pending:
                    parent = pending[-1][0]
                    lowest[parent] = min(lowest[parent], lowest[node])
                if lowest[node] == index[node]:
                    start = stack.index(node)
                    components.append(stack[start:])
                    on_stack.difference_update(stack[start:])
                    del stack[start:]
            elif successor not in index:
                _enter(successor, graph, index, lowest, stack, on_stack, pending)
            elif successor in on_stack:
                lowest[node] = min(lowest[node], index[successor])
    return components


def _enter(
    node: str,
    graph: Mapping[str, Iterable[str]],
    index: dict[str, int],
    lowest: dict[str, int],
    stack: list[str],
    on_stack: set[str],
    pending: list[tuple[str, Iterator[str]]],
) -> None:
    index[node] = lowest[node] = len(index)
    stack.append(node)
    on_stack.add(node)
    pending.append((node, iter(graph.get(node, ()))))


def _import_statements(tree: ast.Module) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool, bool]]:
    """Yield (statement, inside a function, under `if TYPE_CHECKING`)."""
    waiting: list[tuple[ast.AST, bool, bool]] = [(tree, False, False)]
    while waiting:
        node, lazy, type_checking = waiting.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node, lazy, type_checking
            continue
        lazy = lazy or isinstance(node, AnyFunction | ast.Lambda)
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            waiting += [(child, lazy, True) for child in node.body]
            waiting += [(child, lazy, type_checking) for child in node.orelse]
        else:
            waiting += [(child, lazy, type_checking) for child in ast.iter_child_nodes(node)]


# Names ------------------------------------------------------------------------------------------------


def duplicate_classes(modules: Iterable[Module]) -> dict[str, list[Finding]]:
    """Return class name -> where it is defined, of the names that more than one class of the package has."""
    places: dict[str, list[Finding]] = defaultdict(list)
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(Finding(module.file, node.lineno, f"class {node.name}"))
    return {name: sorted(where) for name, where in sorted(places.items()) if len(where) > 1}


def duplicate_stems(modules: Sequence[Module]) -> dict[str, list[str]]:
    """Return stem -> files, of the stems that more than one module has.

    Not counted: `__init__`, `__main__`, and a command of `cli/` that is named after a package, such as `cli/data.py`.
    """
    packages = {module.name.rpartition(".")[2] for module in modules if module.is_package}
    files: dict[str, list[str]] = defaultdict(list)
    for module in modules:
        is_command = module.name.startswith(f"{PACKAGE}.cli.") and module.stem in packages
        if module.stem not in SHARED_STEMS and not is_command:
            files[module.stem].append(module.file)
    return {stem: where for stem, where in sorted(files.items()) if len(where) > 1}


def name_words(name: str) -> list[str]:
    """Split a snake_case or CamelCase name into its words, in lower case: `HTTPServer_for` -> http, server, for."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]


def forbidden_words_in(name: str) -> list[str]:
    """Return the forbidden words that a name contains."""
    text = f"_{'_'.join(name_words(name))}_"
    for term in ALLOWED_TERMS:
        text = text.replace(f"_{term}_", "_")
    return [word for word in text.split("_") if word in FORBIDDEN_WORDS]


def forbidden_definitions(modules: Iterable[Module]) -> list[Finding]:
    """List the functions, methods, classes and modules whose name contains a forbidden word."""
    findings: list[Finding] = []
    for module in modules:
        findings += _forbidden(module.file, 1, "module", module.name.rpartition(".")[2])
        for node in ast.walk(module.tree):
            if isinstance(node, AnyFunction):
                findings += _forbidden(module.file, node.lineno, "function", node.name)
                if node.name.lstrip("_").startswith(FORBIDDEN_PREFIXES):
                    text = f"function {node.name} (begins with a preposition)"
                    findings.append(Finding(module.file, node.lineno, text))
            elif isinstance(node, ast.ClassDef):
                findings += _forbidden(module.file, node.lineno, "class", node.name)
    return sorted(findings)


def forbidden_fields(modules: Iterable[Module]) -> list[Finding]:
    """List the parameters, the fields of classes and the constants of modules whose name contains a forbidden word."""
    findings: list[Finding] = []
    for module in modules:
        findings += _forbidden_targets(module.file, "constant", module.tree.body)
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                findings += _forbidden_targets(module.file, "field", node.body)
            elif isinstance(node, ast.arg):
                findings += _forbidden(module.file, node.lineno, "parameter", node.arg)
            elif (
                isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and ast.unparse(node.value) == "self"
            ):
                findings += _forbidden(module.file, node.lineno, "attribute", node.attr)
    return sorted(findings)


def forbidden_locals(modules: Iterable[Module]) -> list[Finding]:
    """List the variables of modules whose name contains a forbidden word."""
    findings: list[Finding] = []
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                findings += _forbidden(module.file, node.lineno, "variable", node.id)
    return sorted(findings)


def forbidden_names(modules: Iterable[Module]) -> list[Finding]:
    """List every name that modules define and that contains a forbidden word."""
    modules = list(modules)
    findings = {*forbidden_definitions(modules), *forbidden_fields(modules), *forbidden_locals(modules)}
    return sorted(findings)


def _forbidden_targets(file: str, kind: str, body: Iterable[ast.stmt]) -> list[Finding]:
    findings: list[Finding] = []
    for statement in body:
        targets: list[ast.expr] = []
        if isinstance(statement, ast.Assign):
            targets = statement.targets
        elif isinstance(statement, ast.AnnAssign):
            targets = [statement.target]
        for target in targets:
            if isinstance(target, ast.Name):
                findings += _forbidden(file, statement.lineno, kind, target.id)
    return findings


def _forbidden(file: str, line: int, kind: str, name: str) -> list[Finding]:
    words = forbidden_words_in(name)
    return [Finding(file, line, f"{kind} {name} ({', '.join(words)})")] if words else []


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


# Error messages ---------------------------------------------------------------------------------------


def misformed_messages(modules: Iterable[Module]) -> list[Finding]:
    """List the messages of UsageError that are not of the form `field=value: what is wrong. Use X or Y.`

    A message names its subject before a colon, and says what to do in a sentence of its own.
    """
    findings: list[Finding] = []
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "UsageError" and node.args:
                text = _literal_text(node.args[0])
                if text is not None and (": " not in text or _INLINE_ADVICE.search(text)):
                    findings.append(Finding(module.file, node.lineno, text[:90]))
    return sorted(findings)


_INLINE_ADVICE = re.compile(r"[:;,(] ?(try|use|leave|start|take|give|choose|set|write|run|ask) ")


def _literal_text(node: ast.expr) -> str | None:
    """Return the text of a string or f-string, with {} for values; None for another expression."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return None


# Strategies -------------------------------------------------------------------------------------------


def strategy_queries(modules: Sequence[Module]) -> list[Finding]:
    """List where code outside `strategies/` distinguishes strategies by class or name instead of asking them.

    Counted are `isinstance(x, C)` with a class C of the package `strategies`, and comparisons of `strategy.name`.
    """
    prefix = f"{PACKAGE}.strategies"
    classes = {
        node.name
        for module in modules
        if module.name.startswith(prefix)
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ClassDef)
    }
    findings: list[Finding] = []
    for module in modules:
        if module.name.startswith(prefix):
            continue
        entries = absolute_imports(module)
        imported = {entry.alias for entry in entries if entry.name in classes and entry.module.startswith(prefix)}
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Call) and _calls(node, {"isinstance"}):
                names = {part.id for part in ast.walk(node.args[-1]) if isinstance(part, ast.Name)}
                if names & imported:
                    findings.append(Finding(module.file, node.lineno, ast.unparse(node)[:100]))
            elif isinstance(node, ast.Compare):
                sides = [ast.unparse(side) for side in (node.left, *node.comparators)]
                if any(re.search(r"\bstrategy\.name$", side) for side in sides):
                    findings.append(Finding(module.file, node.lineno, ast.unparse(node)[:100]))
    return sorted(findings)


def strategy_subclasses(modules: Iterable[Module]) -> list[Finding]:
    """List the named strategies that inherit from another named strategy: presets that should be data."""
    classes = [
        (module, node)
        for module in modules
        if module.name.startswith(f"{PACKAGE}.strategies.")
        for node in module.tree.body
        if isinstance(node, ast.ClassDef)
    ]
    tagged = {node.name for _, node in classes if _has_tag(node)}
    return [
        Finding(module.file, node.lineno, f"{node.name}({ast.unparse(base)})")
        for module, node in classes
        for base in node.bases
        if ast.unparse(base) in tagged
    ]


def _has_tag(node: ast.ClassDef) -> bool:
    """Return whether a configuration class has a field `name: Literal[...]`."""
    fields = [part for part in node.body if isinstance(part, ast.AnnAssign)]
    return any(ast.unparse(f.target) == "name" and ast.unparse(f.annotation).startswith("Literal[") for f in fields)


# Arguments --------------------------------------------------------------------------------------------


def single_field_functions(modules: Iterable[Module]) -> list[Finding]:
    """List the functions that get a whole run, and read a single field or section of it."""
    findings: list[Finding] = []
    for module, node in _functions(modules):
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        if not any(a.arg == "run" and a.annotation and ast.unparse(a.annotation) == "Run" for a in arguments):
            continue
        uses = [part for part in ast.walk(node) if isinstance(part, ast.Name) and part.id == "run"]
        reads = [
            part for part in ast.walk(node) if isinstance(part, ast.Attribute) and ast.unparse(part.value) == "run"
        ]
        fields = {part.attr for part in reads}
        if uses and len(uses) == len(reads) and len(fields) == 1:
            findings.append(Finding(module.file, node.lineno, f"{node.name} reads run.{fields.pop()} only"))
    return sorted(findings)


# Expressions ------------------------------------------------------------------------------------------


def multi_target_assignments(modules: Iterable[Module]) -> list[Finding]:
    """List assignments such as `a, b = x, y`: two or more targets, and a value written out for each.

    Swaps (`a, b = b, a`), whose values are the targets themselves, are left out.
    """
    return [entry for entry, _ in _multi_targets(modules)]


def unlike_assignments(modules: Iterable[Module]) -> list[Finding]:
    """List the multi-target assignments whose values are built differently, so that nothing relates them.

    `x, y = point.x, point.y` has values of one form; `rows, seed = [], options.seed` has not.
    """
    return [entry for entry, values in _multi_targets(modules) if len({_form(value) for value in values}) > 1]


def _multi_targets(modules: Iterable[Module]) -> Iterator[tuple[Finding, list[ast.expr]]]:
    for module in modules:
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple | ast.List):
                continue
            pairs = [target for target in node.targets if isinstance(target, ast.Tuple | ast.List)]
            if not pairs or len(node.value.elts) < 2:
                continue
            targets = {ast.unparse(element) for element in pairs[0].elts}
            if {ast.unparse(element) for element in node.value.elts} != targets:
                yield Finding(module.file, node.lineno, ast.unparse(node)[:100]), node.value.elts


def _form(value: ast.expr) -> str:
    """Describe how an expression is built: the types of its nodes, without names, constants and their signs."""
    kinds = [type(node).__name__ for node in ast.walk(value)]
    return " ".join(kind for kind in kinds if kind not in ("UnaryOp", "USub"))


def conditional_expressions(modules: Iterable[Module]) -> list[Finding]:
    """List every `x if condition else y`."""
    return [
        Finding(module.file, node.lineno, ast.unparse(node)[:100])
        for module in modules
        for node in ast.walk(module.tree)
        if isinstance(node, ast.IfExp)
    ]


def chained_conditionals(modules: Iterable[Module]) -> list[Finding]:
    """List conditional expressions with another as their condition or as one of their values; a chain counts once."""
    findings: list[Finding] = []
    for module in modules:
        inner: set[ast.AST] = set()
        for node in ast.walk(module.tree):  # parents come before their children
            if not isinstance(node, ast.IfExp):
                continue
            nested = [part for part in (node.test, node.body, node.orelse) if isinstance(part, ast.IfExp)]
            if nested and node not in inner:
                findings.append(Finding(module.file, node.lineno, ast.unparse(node)[:100]))
            inner.update(nested)
    return findings


def conditional_repetitions(modules: Iterable[Module]) -> list[Finding]:
    """List sequences that are multiplied by a condition: `[x] * (n > 1)`, `", " * bool(rest)`."""
    findings: list[Finding] = []
    for module in modules:
        findings += _repetitions(module, module.tree, frozenset(), _is_condition)
    return findings


def length_repetitions(modules: Iterable[Module]) -> list[Finding]:
    """List sequences that are multiplied by a length: `[x] * len(rows)`. Standard Python; counted, not forbidden."""
    findings: list[Finding] = []
    for module in modules:
        findings += _repetitions(module, module.tree, frozenset(), lambda node, _: _calls(node, {"len"}))
    return findings


def _repetitions(
    module: Module, node: ast.AST, flags: frozenset[str], matches: Callable[[ast.expr, frozenset[str]], bool]
) -> list[Finding]:
    """Look for matching products below `node`. flags: the parameters in scope that are annotated as `bool`."""
    findings: list[Finding] = []
    if isinstance(node, AnyFunction):
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        booleans = {arg.arg for arg in arguments if arg.annotation and ast.unparse(arg.annotation) == "bool"}
        flags = (flags - {arg.arg for arg in arguments}) | booleans
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        for sequence, factor in ((node.left, node.right), (node.right, node.left)):
            if _is_sequence(sequence) and matches(factor, flags):
                findings.append(Finding(module.file, node.lineno, ast.unparse(node)[:100]))
    for child in ast.iter_child_nodes(node):
        findings += _repetitions(module, child, flags, matches)
    return findings


def _is_sequence(node: ast.expr) -> bool:
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)
    return is_text or isinstance(node, ast.List | ast.Tuple | ast.JoinedStr | ast.ListComp)


def _is_condition(node: ast.expr, flags: frozenset[str]) -> bool:
    if isinstance(node, ast.Name):
        return node.id in flags
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.Not)
    return isinstance(node, ast.Compare | ast.BoolOp) or _calls(node, {"bool", "isinstance", "any", "all", "hasattr"})


def _calls(node: ast.AST, names: set[str]) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names


# Docstrings -------------------------------------------------------------------------------------------


def public_functions(modules: Iterable[Module]) -> tuple[list[Finding], list[Finding]]:
    """Return the public functions with a docstring, and those without.

    Public are functions of a module and methods of its classes, where neither the function nor the class nor the
    module begins with an underscore. Overloads are not counted.
    """
    documented: list[Finding] = []
    undocumented: list[Finding] = []
    for module in modules:
        if any(_is_private(part) for part in module.name.split(".")):
            continue
        for node, name in _public_definitions(module.tree.body):
            target = documented if ast.get_docstring(node) else undocumented
            target.append(Finding(module.file, node.lineno, name))
    return documented, undocumented


def undocumented_interfaces(modules: Sequence[Module]) -> list[Finding]:
    """List the functions that a module of another package imports by name, and that have no docstring."""
    by_name = {module.name: module for module in modules}
    used = {(entry.module, entry.name) for entry in internal_imports(modules) if entry.name and _crosses(entry)}
    findings: list[Finding] = []
    for owner, name in used:
        for node in by_name[owner].tree.body:
            if isinstance(node, AnyFunction) and node.name == name and not ast.get_docstring(node):
                findings.append(Finding(by_name[owner].file, node.lineno, name))
    return sorted(findings)


def _crosses(entry: Import) -> bool:
    return entry.importer.split(".")[:2] != entry.module.split(".")[:2]


def modules_without_docstring(modules: Iterable[Module]) -> list[Finding]:
    """List the public modules that hold code but no docstring."""
    return [
        Finding(module.file, 1, "has no docstring")
        for module in modules
        if module.tree.body and not ast.get_docstring(module.tree) and not _is_private(module.stem)
    ]


def _public_definitions(body: Iterable[ast.stmt], prefix: str = "") -> Iterator[tuple[AnyFunction, str]]:
    for node in body:
        if isinstance(node, AnyFunction) and not node.name.startswith("_"):
            if not any(ast.unparse(decorator).endswith("overload") for decorator in node.decorator_list):
                yield node, f"{prefix}{node.name}"
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_") and not prefix:
            yield from _public_definitions(node.body, f"{node.name}.")


def _functions(modules: Iterable[Module]) -> Iterator[tuple[Module, AnyFunction]]:
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, AnyFunction):
                yield module, node


# Counts and the table ---------------------------------------------------------------------------------


def count_all(root: Path) -> dict[str, int]:
    """Return every count of a checkout, by its label in the table."""
    modules = load_modules(root)
    loaded = import_cycles(modules)
    all_cycles = import_cycles(modules, lazy=True)
    with_types = import_cycles(modules, lazy=True, type_checking=True)
    classes = duplicate_classes(modules)
    documented, undocumented = public_functions(modules)
    functions = [node for _, node in _functions(modules)]
    forbidden = forbidden_definitions(modules)
    return {
        "modules": len(modules),
        "lines": count_lines(modules),
        "lines of code (no blanks, comments, docstrings)": count_code_lines(modules),
        "import cycles at load": len(loaded),
        "  modules in them": sum(map(len, loaded)),
        "import cycles with imports in functions": len(all_cycles),
        "  modules in them, functions": sum(map(len, all_cycles)),
        "import cycles with TYPE_CHECKING too": len(with_types),
        "  modules in them, TYPE_CHECKING": sum(map(len, with_types)),
        "private names of other modules used": len(private_imports(modules)),
        "class names defined more than once": len(classes),
        "  classes of these names": sum(map(len, classes.values())),
        "module stems that occur more than once": len(duplicate_stems(modules)),
        "functions and methods": len(functions),
        "functions named by a forbidden word": len(
            {(f.file, f.line) for f in forbidden if f.text.startswith("function")}
        ),
        "classes named by a forbidden word": sum(entry.text.startswith("class") for entry in forbidden),
        "modules named by a forbidden word": sum(entry.text.startswith("module") for entry in forbidden),
        "fields, parameters, constants by a forbidden word": len(forbidden_fields(modules)),
        "variables by a forbidden word": len(forbidden_locals(modules)),
        "names of tests and benchmarks by a forbidden word": sum(
            len(forbidden_names(load_modules(root, folder))) for folder in ("tests", "benchmarks")
        ),
        "error messages not in the one form": len(misformed_messages(modules)),
        "functions that get a run and read one field": len(single_field_functions(modules)),
        "strategies distinguished by class or name": len(strategy_queries(modules)),
        "named strategies that subclass another": len(strategy_subclasses(modules)),
        "multi-target assignments": len(multi_target_assignments(modules)),
        "  of values built differently": len(unlike_assignments(modules)),
        "conditional expressions": len(conditional_expressions(modules)),
        "  chained": len(chained_conditionals(modules)),
        "sequences multiplied by a condition": len(conditional_repetitions(modules)),
        "sequences multiplied by a length": len(length_repetitions(modules)),
        "public functions with a docstring": len(documented),
        "public functions without": len(undocumented),
        "  used by other packages": len(undocumented_interfaces(modules)),
        "public modules without a docstring": len(modules_without_docstring(modules)),
        f"functions over {MAX_FUNCTION_LINES} lines": len(long_functions(modules)),
        "longest function, lines": max(map(_function_lines, functions), default=0),
        "words of README.md": count_words([path for path in [root / "README.md"] if path.is_file()]),
        "words of docs/": count_words(sorted((root / "docs").rglob("*.md"))),
    }


# label of a list -> what makes it, for `--list`
LISTS: dict[str, Callable[[Sequence[Module]], Iterable[object]]] = {
    "cycles": lambda modules: map(" ".join, import_cycles(modules, lazy=True)),
    "private": private_imports,
    "classes": lambda modules: (str(place) for places in duplicate_classes(modules).values() for place in places),
    "stems": lambda modules: (f"{stem}: {' '.join(files)}" for stem, files in duplicate_stems(modules).items()),
    "forbidden": forbidden_definitions,
    "fields": forbidden_fields,
    "names": forbidden_names,
    "messages": misformed_messages,
    "runs": single_field_functions,
    "assignments": multi_target_assignments,
    "unlike": unlike_assignments,
    "strategies": lambda modules: [*strategy_queries(modules), *strategy_subclasses(modules)],
    "interfaces": undocumented_interfaces,
    "chained": chained_conditionals,
    "repetitions": conditional_repetitions,
    "undocumented": lambda modules: public_functions(modules)[1],
    "long": long_functions,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Print the counts of one checkout, or of several side by side."""
    parser = argparse.ArgumentParser(description="Count modules, import cycles, names and expressions of checkouts.")
    parser.add_argument("roots", nargs="*", type=Path, metavar="ROOT", help="checkouts, before and after (this one)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--list", choices=sorted(LISTS), help="list what is counted, with file and line")
    parser.add_argument("--folder", default=PACKAGE, help="what to list of: the package, tests or benchmarks")
    options = parser.parse_args(argv)
    roots = options.roots or [Path(__file__).resolve().parent.parent]
    if options.list:
        for root in roots:
            sys.stdout.writelines(f"{entry}\n" for entry in LISTS[options.list](load_modules(root, options.folder)))
        return 0
    counts = [count_all(root) for root in roots]
    if options.json:
        sys.stdout.write(f"{json.dumps(counts if len(counts) > 1 else counts[0], indent=2)}\n")
        return 0
    labels = list(counts[0])
    width = max(map(len, labels))
    if len(roots) > 1:
        heads = ["before", "after"] if len(roots) == 2 else [root.name for root in roots]
        sys.stdout.write(f"{'':<{width}}{''.join(f'{head:>10}' for head in heads)}\n")
    for label in labels:
        sys.stdout.write(f"{label:<{width}}{''.join(f'{column[label]:>10,}' for column in counts)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
