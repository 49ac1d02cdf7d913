"""Puts the notebooks on the site, executed, with their pictures.

They are stored without outputs, and run when the site is built. A run is kept in build/notebooks
and used again until the notebook or the code changes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FOLDER = "notebooks"
_KEPT = ROOT / "build" / FOLDER


def on_files(files: Any, config: Any) -> Any:
    """MkDocs' event: the files of the site, before they are put in order."""
    from mkdocs.structure.files import File

    for path in sorted((ROOT / FOLDER).glob("*.ipynb")):
        for name, content in page(executed(path), path.stem):
            files.append(File.generated(config, f"{FOLDER}/{name}", content=content))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """MkDocs' event: links to notebooks of the repository lead to their pages."""
    return re.sub(rf"\]\(\.\./((?:\.\./)*{FOLDER}/\w+)\.ipynb\)", r"](\1.md)", markdown)


def executed(path: Path) -> Any:
    """The notebook with outputs; of an earlier run if notebook and code have not changed.

    Raises:
        CellExecutionError: a cell fails.
    """
    import nbformat
    from nbclient import NotebookClient

    kept = _KEPT / f"{path.stem}-{_version(path)}.ipynb"
    if not kept.is_file():
        notebook = nbformat.read(path, as_version=4)
        resources = {"metadata": {"path": str(path.parent)}}
        NotebookClient(notebook, timeout=1200, resources=resources).execute()
        kept.parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(notebook, kept)
    return nbformat.read(kept, as_version=4)


def _version(path: Path) -> str:
    """Tells notebook and code from any other."""
    code = [file for package in ("selfspec", "training") for file in (ROOT / package).rglob("*.py")]
    content = b"".join(file.read_bytes() for file in (path, *sorted(code)))
    return sha256(content).hexdigest()[:12]


def page(notebook: Any, name: str) -> Iterator[tuple[str, str | bytes]]:
    """The page in Markdown and its pictures, by their paths in the folder of notebooks."""
    from nbconvert import MarkdownExporter

    for cell in notebook.cells:
        if "outputs" in cell:  # progress bars are of no use on paper
            cell.outputs = [one for one in cell.outputs if one.get("name") != "stderr"]
    resources = {"unique_key": name, "output_files_dir": f"{name}_files"}
    text, resources = MarkdownExporter().from_notebook_node(notebook, resources)
    yield f"{name}.md", text
    yield from resources["outputs"].items()
