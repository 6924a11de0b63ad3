# SPDX-License-Identifier: Apache-2.0
"""Options and endings that several groups of commands share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

LAST_SEED = 2**63 - 1  # as config.yaml has it: what a column of a table can hold
Gpu = Annotated[int, typer.Option(help="Which of the visible GPUs, from 0.", min=0)]
GpuName = Annotated[str, typer.Option(help="Which GPU: A100, RTX 3090, L40S, H100 SXM, H200, ...")]
After = Annotated[Path | None, typer.Option(help="Touch the GPU only once this file (record.json) is there.")]
Limit = Annotated[float, typer.Option(help="Seconds to wait for the file, and for the GPU's lock.", min=0)]
FixtureFolder = Annotated[Path, typer.Option("--fixture", help="Folder of a fixture.")]
History = Literal["H0", "H1"]
PointName = Literal["published", "auto"]
Surface = Literal["w13", "activation", "w2", "final"]
Lane = Literal["twin-ampere", "twin-hopper", "cuda"]
LaneName = Annotated[Lane, typer.Option(help="Where it is computed.")]
FrozenPrediction = Annotated[Path, typer.Option(help="The frozen prediction of the runs.")]
RunsFolder = Annotated[Path, typer.Option(help="Folder of the runs, {cell}/{history}/rep{n} below it.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="List everything, not the first alone.")]
Given = Annotated[Path | None, typer.Option(help="Made before; default: compiled here.")]
Model = Annotated[Path | None, typer.Option(help="A model's config.json, or its folder.")]
Hidden = Annotated[int | None, typer.Option(help="Hidden size.", min=1)]
Intermediate = Annotated[int | None, typer.Option(help="Intermediate size of an expert, before --tp.", min=1)]
Experts = Annotated[int | None, typer.Option(help="Experts of the model.", min=1)]
TopK = Annotated[int | None, typer.Option(help="Experts of a token.", min=1)]
DtypeName = Literal["float16", "bfloat16"]
Dtype = Annotated[DtypeName | None, typer.Option(help="Of activations and scales; default: the model's.")]
GroupSize = Annotated[int | None, typer.Option(help="Quantisation group along K; -1: one scale a column.")]
ZeroPoints = Annotated[
    bool | None, typer.Option("--zero-points/--symmetric", help="Zero points (AWQ), or the fixed 8 (GPTQ-style).")
]
Vllm = Annotated[str, typer.Option(help="vLLM's release, such as 0.24.0.")]
MoeBackend = Annotated[Literal["auto", "marlin", "humming"], typer.Option(help="vLLM's --moe-backend.")]
Tokens = Annotated[int | None, typer.Option(help="Tokens of the batch, if no --routing is given.", min=1)]
Seed = Annotated[int, typer.Option(help="Seed of what is drawn.", min=0)]
Out = Annotated[Path, typer.Option(help="Folder to write to.")]
ProtocolFile = Annotated[Path, typer.Option("--protocol", help="The committed protocol.")]
CommittedRecord = Annotated[Path, typer.Option(help="A committed record, with its contents.json.")]
RecordFolder = Annotated[Path, typer.Option(help="The record's folder.")]
StatisticsFile = Annotated[Path, typer.Option(help="Its statistics.json.")]
Recomputed = Annotated[Path, typer.Option(help="The statistics.json to recompute.")]
DeclaredEdits = Annotated[Path, typer.Option("--declared", help="The declared edits.")]
EDITS = Path("fixtures/record_edits.json")
MutationsFile = Annotated[Path | None, typer.Option("--mutations", help="Its mutations.json, for the table of edits.")]
ValidationFile = Annotated[Path, typer.Option("--validation", help="Its validation.json.")]
TableName = Annotated[str, typer.Argument(help="Which table.")]


def finish(wrong: Sequence[object], otherwise: str) -> None:
    """Print what is wrong, one line each, and end with exit code 1; print `otherwise` if nothing is."""
    for line in wrong:
        print(line)
    if wrong:
        raise typer.Exit(1)
    print(otherwise)


def print_findings(found: Sequence[object], verbose: bool) -> None:
    """Print the first finding and how many more there are, or all of them."""
    first, *others = found
    more = f" (and {len(others)} more; -v lists them)" if others and not verbose else ""
    print(f"{first}{more}")
    for finding in others if verbose else ():
        print(finding)
