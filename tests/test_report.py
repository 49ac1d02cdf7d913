"""What a fit reports: predictions that follow the formula, a file that reads back, plots."""

import io
import json
import struct
import sys

import pytest
from rich.console import Console

from training.exits.calibrate import Bin
from training.exits.report import (
    ExitFigures,
    figures_table,
    write_report,
)

FIGURES = [
    ExitFigures("lens", 4, [0.4, 0.3], [0.46, 0.35], {"greedy": 1.5, "sampled": 1.62}, 1.07, 0.021),
    ExitFigures("block", 2, [0.5, 0.45, 0.4], [0.6, 0.55, 0.52]),
    ExitFigures("block", 4, [0.57], [0.66], {"sampled": 2.25}),
]
HISTORY = [
    {"step": 0, "loss": 3.0, "lr_scale": 1.0},
    {"step": 1, "loss": 2.5, "lr_scale": 0.5, "held_out_loss": 2.7},
]
BINS = {"lens, exit 4": [Bin(0.2, 0.25, 40), Bin(0.7, 0.65, 60)]}
PLOTS = ["acceptance_by_exit", "acceptance_by_depth", "loss", "reliability"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ExitFigures("lens", 4, [], []), "lens, exit 4: .* got 0 and 0"),
        (lambda: ExitFigures("lens", 4, [0.5], [0.5, 0.6]), "got 1 and 2"),
    ],
)
def test_what_predicts_nothing_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# The table


def shown(figures, width=80) -> str:
    paper = io.StringIO()
    Console(file=paper, width=width).print(figures_table(figures, "held out"))
    return paper.getvalue()


def test_a_table_has_a_line_for_each_exit_and_fits_a_terminal():
    text = shown(FIGURES)
    assert "…" not in text
    lens, shallow, deep = (line.split("│")[1:-1] for line in text.splitlines() if "│" in line)
    assert [cell.strip() for cell in lens] == [
        *("lens", "4", "0.40→0.30", "0.46→0.35", "1.50", "1.62", "1.07×", "0.021")
    ]
    assert [cell.strip() for cell in shallow[4:]] == ["–"] * 4
    assert [cell.strip() for cell in deep[2:6]] == ["0.57", "0.66", "–", "2.25"]


def test_a_table_without_decoding_has_no_columns_for_it():
    assert "greedy" not in shown(FIGURES[1:2])
    assert shown([])


# Files


def test_a_report_reads_back(tmp_path):
    report = write_report(tmp_path / "new", FIGURES, HISTORY, BINS)[0]
    content = json.loads(report.read_text(encoding="utf-8"))
    assert [ExitFigures(**exit) for exit in content["exits"]] == FIGURES
    assert [Bin(**b) for b in content["reliability"]["lens, exit 4"]] == BINS["lens, exit 4"]


def test_each_plot_is_an_image_of_the_size_asked_for(tmp_path):
    files = write_report(tmp_path, FIGURES, HISTORY, BINS)
    assert sorted(tmp_path.iterdir()) == sorted(files)
    assert [file.name for file in files] == ["report.json", *(f"{name}.png" for name in PLOTS)]
    for file in files[1:]:
        head = file.read_bytes()[:24]
        assert head.startswith(b"\x89PNG")
        assert struct.unpack(">II", head[16:24]) == (1200, 675)


def test_long_runs_and_many_exits_can_be_drawn(tmp_path):
    history = [{"step": step, "loss": 3.0 / (step + 1)} for step in range(500)]
    many = [ExitFigures("lens", layer, [0.4], [0.5]) for layer in range(1, 20)]
    assert len(write_report(tmp_path, many, history)) == 4


def test_what_there_is_nothing_of_is_not_drawn(tmp_path):
    names = [file.name for file in write_report(tmp_path, [], [{"step": 0, "lr_scale": 1.0}])]
    assert names == ["report.json"]


def test_without_matplotlib_there_is_the_file_and_a_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    said = []
    files = write_report(tmp_path, FIGURES, HISTORY, BINS, said.append)
    assert [file.name for file in files] == ["report.json"]
    assert len(said) == 1 and "pip install matplotlib" in said[0]


def test_a_report_that_cannot_be_written_leaves_the_one_before(tmp_path):
    write_report(tmp_path, FIGURES)
    before = (tmp_path / "report.json").read_text(encoding="utf-8")
    broken = [ExitFigures("lens", 4, [0.5], [0.5], {"greedy": object()})]  # pyright: ignore
    with pytest.raises(TypeError):
        write_report(tmp_path, broken)
    assert (tmp_path / "report.json").read_text(encoding="utf-8") == before
