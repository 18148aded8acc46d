"""Pages of the site about files outside docs/: documents of the project, and source files that documents name.

Links of the documents lead to files of the repository. Here those that leave docs/ get a page of the site, and names of
source files in backquotes (`comm/gossip.py`) become links. `<!-- code: FILE NAME -->` shows a function or class.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mkdocs.plugins import get_plugin_logger
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
DOCUMENTS = ("README", "CONTRIBUTING", "CHANGELOG", "SECURITY", "GOVERNANCE", "CODE_OF_CONDUCT")
BASES = (ROOT, ROOT / "paragan", ROOT / "tests")  # where documents count paths of source files from
LANGUAGES = {".py": "python", ".c": "c", ".sh": "bash", ".yaml": "yaml", ".yml": "yaml", ".html": "html"}

LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
SOURCE_NAME = re.compile(r"(?<![\[`])`((?:[\w.-]+/)+[\w-]+\.(?:py|c|sh|yaml))`(?!`)")
EMBEDDED = re.compile(r"^<!-- code: (\S+) (\S+) -->$")
FENCE = re.compile(r"^\s*(`{3,}|~{3,})")

logger = get_plugin_logger("repository_pages")


def on_files(files: Files, config: Any) -> Files:
    """Add the documents of the project, and a page for every source file that a document names."""
    for name in DOCUMENTS:
        text = (ROOT / f"{name}.md").read_text("utf-8")
        files.append(File.generated(config, f"project/{name.lower()}.md", content=text))
    sources = {path for file in files.documentation_pages() for path in _named_sources(file)}
    for path in sorted(sources):
        files.append(File.generated(config, _source_page(path), content=_format_source(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Point links to files outside docs/ at their pages, link names of source files, and show embedded code."""
    if page.file.src_uri.startswith("source/"):
        return markdown
    return convert(markdown, page.file.src_uri)


def convert(markdown: str, uri: str) -> str:
    """Return the text of the page at `uri` with links that hold within the site."""
    folder = _repository_path(uri).parent

    def replace_link(match: re.Match[str]) -> str:
        start, target, end = match.groups()
        page = "" if re.match(r"[a-z]+:", target) else _page_of((folder / target).resolve())
        return f"{start}{_relative(page, uri)}{end}" if page else match[0]

    def link_name(match: re.Match[str]) -> str:
        path = find_source(match[1])
        return f"[{match[0]}]({_relative(_source_page(path), uri)})" if path else match[0]

    def convert_line(line: str) -> str:
        if embedded := EMBEDDED.match(line):
            return embed(*embedded.groups())
        return SOURCE_NAME.sub(link_name, LINK.sub(replace_link, line))

    return _map_prose(markdown, convert_line)


def find_source(name: str) -> Path | None:
    """Return the file of the repository that documents call so, or None."""
    return next((base / name for base in BASES if (base / name).is_file()), None)


def embed(file: str, name: str) -> str:
    """Return a code block with the function or class `name` (dotted within a class) of a file."""
    path = find_source(file)
    node: Any = ast.parse(path.read_text("utf-8")) if path else None
    for part in name.split("."):
        node = next((child for child in getattr(node, "body", []) if getattr(child, "name", "") == part), None)
    if not path or not node:
        logger.warning(f"<!-- code: {file} {name} -->: there is no such file or name")
        return ""
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    lines = path.read_text("utf-8").splitlines()[first - 1 : node.end_lineno]
    indent = len(lines[0]) - len(lines[0].lstrip())
    return "\n".join([f'```python title="{file}" linenums="{first}"', *(line[indent:] for line in lines), "```"])


def _map_prose(markdown: str, convert_line: Callable[[str], str]) -> str:
    return "\n".join(convert_line(line) if is_prose else line for line, is_prose in _split_prose(markdown))


def _split_prose(markdown: str) -> Iterator[tuple[str, bool]]:
    """Yield (line, whether it stands outside of code blocks)."""
    fence = ""
    for line in markdown.split("\n"):
        match = FENCE.match(line)
        if match and (not fence or match[1].startswith(fence)):
            fence = "" if fence else match[1]
            yield line, False
        else:
            yield line, not fence and not line.startswith("    ")


def _repository_path(uri: str) -> Path:
    """Return the file of the repository that a page is made of."""
    folder, _, name = uri.rpartition("/")
    return ROOT / f"{Path(name).stem.upper()}.md" if folder == "project" else DOCS / uri


def _page_of(path: Path) -> str:
    """Return the page of a file of the repository, or "" if it has none."""
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    if path.parent == ROOT and path.stem in DOCUMENTS:
        return f"project/{path.stem.lower()}.md"
    return _source_page(path) if path.is_relative_to(ROOT) and path.is_file() else ""


def _relative(page: str, uri: str) -> str:
    return os.path.relpath(page, Path(uri).parent).replace(os.sep, "/")


def _source_page(path: Path) -> str:
    return f"source/{path.relative_to(ROOT).as_posix()}.md"


def _named_sources(file: File) -> Iterator[Path]:
    folder = _repository_path(file.src_uri).parent
    for line, is_prose in _split_prose(file.content_string):
        if not is_prose:
            continue
        for match in SOURCE_NAME.finditer(line):
            if path := find_source(match[1]):
                yield path
        for _, target, _ in LINK.findall(line):
            path = (folder / target).resolve()
            if _page_of(path).startswith("source/"):
                yield path


def _format_source(path: Path) -> str:
    text = path.read_text("utf-8").rstrip("\n")
    name = path.relative_to(ROOT).as_posix()
    language = LANGUAGES.get(path.suffix, "text")
    fence = "`" * max(3, 1 + max(map(len, re.findall(r"`+", text)), default=0))
    head = f"---\ntitle: {name}\nsearch: {{exclude: true}}\nhide: [toc]\n---\n\n# {name}\n\n"
    if name.startswith("examples/"):
        head += f"Commands that name it are for a clone. Without one, save this file as `{name}`.\n\n"
    return f'{head}{fence}{language} linenums="1"\n{text}\n{fence}\n'
