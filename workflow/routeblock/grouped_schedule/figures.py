# SPDX-License-Identifier: Apache-2.0
"""Study B's figures, each from the table of its name."""

from __future__ import annotations

from routeblock.figure_style import TableFigure
from routeblock.grouped_schedule import figure_confirmation, figure_discovery

FIGURES = {
    "confirmation": TableFigure(
        "Confirmation: the schedule fixed in advance against the control",
        figure_confirmation.COLUMNS,
        figure_confirmation.draw,
    ),
    "discovery": TableFigure(
        "Discovery: every schedule at every shape", figure_discovery.COLUMNS, figure_discovery.draw
    ),
}
