# SPDX-License-Identifier: Apache-2.0
"""Study B's figures, each from the table of its name."""

from __future__ import annotations

from routeblock.declared import by_name
from routeblock.figure_style import TableFigure
from routeblock.grouped_schedule import figure_confirmation, figure_discovery

FIGURES = by_name(
    TableFigure(
        "confirmation",
        "Confirmation: the schedule fixed in advance against the control",
        "Forest plot of the change of time of band32 against the control on each device, with intervals, A/A "
        "floors and the published values. Table confirmation has the numbers.",
        figure_confirmation.COLUMNS,
        figure_confirmation.draw,
    ),
    TableFigure(
        "discovery",
        "Discovery: every schedule at every shape",
        "Change of time of every schedule at every shape on each device. Table discovery has the numbers.",
        figure_discovery.COLUMNS,
        figure_discovery.draw,
    ),
)
