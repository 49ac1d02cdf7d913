"""What a fit reports: predictions that follow the formula, a file that reads back, plots."""

import io
import json
import re
import struct
import sys
from base64 import b64decode

import pytest
from rich.console import Console

from training.exits.calibrate import Bin
from training.exits.report import (
    ExitFigures,
    draw_plots,
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
PLOTS = [
    "Acceptance of the first drafted token: novels",
    "Acceptance along the draft: novels",
    "Loss",
    "Reliability of the calibrators",
]


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
    report, page = write_report(tmp_path / "new", {"novels": FIGURES}, HISTORY, BINS)
    content = json.loads(report.read_text(encoding="utf-8"))
    assert [ExitFigures(**exit) for exit in content["domains"]["novels"]] == FIGURES
    assert [Bin(**b) for b in content["reliability"]["lens, exit 4"]] == BINS["lens, exit 4"]
    assert [file.name for file in (report, page)] == ["report.json", "report.html"]


def test_the_page_has_its_pictures_inside_and_loads_nothing(tmp_path):
    facts = {"load": "from_pretrained('a<b>')"}
    _, page = write_report(tmp_path, {"novels": FIGURES}, HISTORY, BINS, facts)
    text = page.read_text(encoding="utf-8")
    assert re.findall(r'alt="([^"]+)"', text) == PLOTS
    assert "from_pretrained(&#x27;a&lt;b&gt;&#x27;)" in text
    assert "<td>0.46→0.35</td>" in text
    addresses = re.findall(r"(?:src|href|url)\b[=(]+[\"']?([^\"')>]+)", text)
    assert len(addresses) == len(PLOTS)
    for address in addresses:
        head, _, data = address.partition(",")
        assert head == "data:image/png;base64"
        png = b64decode(data)
        assert png.startswith(b"\x89PNG")
        assert struct.unpack(">II", png[16:24]) == (1050, 600)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["report.html", "report.json"]


def test_long_runs_and_many_exits_can_be_drawn():
    history = [{"step": step, "loss": 3.0 / (step + 1)} for step in range(500)]
    many = [ExitFigures("lens", layer, [0.4], [0.5]) for layer in range(1, 20)]
    assert len([*draw_plots({"novels": many}, history, {})]) == 3


def test_what_there_is_nothing_of_is_not_drawn():
    assert [*draw_plots({"novels": []}, [{"step": 0, "lr_scale": 1.0}], {})] == []
    alone = draw_plots({"novels": FIGURES[:1]}, [], {})
    assert [shows for shows, _ in alone] == ["Acceptance along the draft: novels"]


def test_without_matplotlib_there_are_the_figures_and_a_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    said = []
    _, page = write_report(tmp_path, {"novels": FIGURES}, HISTORY, BINS, say=said.append)
    assert len(said) == 1 and "pip install matplotlib" in said[0]
    assert said[0] in page.read_text() and "<img" not in page.read_text()


def test_a_report_that_cannot_be_written_leaves_the_one_before(tmp_path):
    write_report(tmp_path, {"novels": FIGURES})
    before = (tmp_path / "report.json").read_text(encoding="utf-8")
    broken = [ExitFigures("lens", 4, [0.5], [0.5], {"greedy": object()})]  # pyright: ignore
    with pytest.raises(TypeError):
        write_report(tmp_path, {"novels": broken})
    assert (tmp_path / "report.json").read_text(encoding="utf-8") == before
