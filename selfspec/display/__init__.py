"""What a call did, for the eye: traces in HTML and on terminals, tables, figures."""

from selfspec.display.exits import ExitReadings, exit_readings
from selfspec.display.html import TraceHTML, legend_html, pieces_html, trace_html
from selfspec.display.pieces import Detokenizer, Kind, Piece, RoundPieces, kinds, pieces
from selfspec.display.plots import acceptance_plot, exits_heatmap, exits_plot
from selfspec.display.profile import speedup_map, speedup_table, validation_table
from selfspec.display.terminal import (
    OriginStreamer,
    in_colour,
    legend,
    marked,
    stats_table,
    trace_text,
    unmarked,
    write_piece,
)

__all__ = [
    "Detokenizer",
    "ExitReadings",
    "Kind",
    "OriginStreamer",
    "Piece",
    "RoundPieces",
    "TraceHTML",
    "acceptance_plot",
    "exit_readings",
    "exits_heatmap",
    "exits_plot",
    "in_colour",
    "kinds",
    "legend",
    "legend_html",
    "marked",
    "pieces",
    "pieces_html",
    "speedup_map",
    "speedup_table",
    "stats_table",
    "trace_html",
    "trace_text",
    "unmarked",
    "validation_table",
    "write_piece",
]
