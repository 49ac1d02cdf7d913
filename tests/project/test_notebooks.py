"""Notebooks: outputs stripped, cells short, and every cell runs."""

import nbformat
import pytest
from conftest import ROOT
from nbclient import NotebookClient

FOLDER = ROOT / "notebooks"
notebooks = pytest.mark.parametrize("path", sorted(FOLDER.glob("*.ipynb")), ids=lambda p: p.stem)


def code_cells(path):
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


def in_small(notebook, folder):
    """The notebook with other values behind its cell of parameters (papermill's convention)."""
    run, none = str(folder / "run"), str(folder / "none")
    small = {"steps": 4, "prompts": 0, "output": run, "heads": none, "new_tokens": 16}
    cells = notebook.cells
    for place, cell in enumerate(cells):
        if "parameters" in cell.metadata.get("tags", ()):
            names = [line.partition(" = ")[0] for line in cell.source.splitlines()]
            values = "\n".join(f"{name} = {small[name]!r}" for name in names)
            cells.insert(place + 1, nbformat.v4.new_code_cell(values))
            break
    return notebook


@notebooks
def test_outputs_are_stripped(path):
    assert all(not cell.outputs and cell.execution_count is None for cell in code_cells(path))


@notebooks
def test_cells_are_short_and_define_nothing(path):
    for cell in code_cells(path):
        lines = cell.source.splitlines()
        assert len(lines) < 10, cell.source
        assert not any(line.startswith(("def ", "async def ", "class ")) for line in lines), (
            cell.source
        )


@pytest.mark.slow
@pytest.mark.timeout(900)  # they fit and measure; longer beside other work
@notebooks
def test_runs(path, tmp_path):
    """Once more, too, where the run of the first time is still there."""
    keeps_a_run = any("\noutput = " in f"\n{cell.source}" for cell in code_cells(path))
    for _ in range(1 + keeps_a_run):
        notebook = in_small(nbformat.read(path, as_version=4), tmp_path)
        resources = {"metadata": {"path": str(FOLDER)}}
        NotebookClient(notebook, timeout=None, resources=resources).execute()
