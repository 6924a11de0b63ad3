# SPDX-License-Identifier: Apache-2.0
"""Captions: reStructuredText, the same files that Snakemake's own report shows, as HTML."""

from __future__ import annotations

from pathlib import Path

from docutils.core import publish_parts
from docutils.utils import SystemMessage
from markupsafe import Markup

from routeblock.errors import InputError

# Nothing from outside the file, no raw HTML, no stylesheet, and a fault in the text is an error.
_SETTINGS = {
    "file_insertion_enabled": False,
    "raw_enabled": False,
    "_disable_config": True,
    "halt_level": 2,
    "report_level": 5,
    "initial_header_level": 4,
    "embed_stylesheet": False,
}


def caption(folder: Path, kind: str, name: str) -> Markup:
    """The caption `{kind}_{name}.rst` as HTML. Raises InputError where it is missing or not reStructuredText."""
    path = folder / f"{kind}_{name}.rst"
    try:
        text = path.read_text(encoding="utf-8")
        parts = publish_parts(text, writer="html5", settings_overrides=_SETTINGS)
    except (OSError, SystemMessage) as e:
        raise InputError(
            f"no readable caption: {str(e).splitlines()[0]}",
            where=str(path),
            limit="each figure and table has one, in reStructuredText",
            way_out="write it",
        ) from e
    return Markup(parts["fragment"].strip())
