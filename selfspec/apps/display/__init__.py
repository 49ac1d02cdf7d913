"""Shows what a call did: traces in HTML and in terminals, tables, plots."""

from selfspec.apps.display.plots import (
    ExitReadings,
    acceptance_plot,
    exit_readings,
    exits_heatmap,
    exits_plot,
    speedup_map,
    validation_table,
)
from selfspec.apps.display.trace import (
    OriginStreamer,
    stats_table,
    trace_html,
    trace_svg,
    trace_text,
)

__all__ = [
    "ExitReadings",
    "OriginStreamer",
    "acceptance_plot",
    "exit_readings",
    "exits_heatmap",
    "exits_plot",
    "speedup_map",
    "stats_table",
    "trace_html",
    "trace_svg",
    "trace_text",
    "validation_table",
]
