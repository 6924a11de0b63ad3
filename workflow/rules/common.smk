import json
from pathlib import Path

from routeblock.evidence.record import RECORD, RECORD_MANIFEST, TELEMETRY, TELEMETRY_MANIFEST, TENSORS
from routeblock.route_block.cells import CELLS, HISTORIES, cells_of, position
from routeblock.route_block.fixture import SPEC, TENSOR_FILES
from routeblock.grouped_schedule import wiring as grouped
from routeblock.workflow import checkpoint_arguments, code, prepare

CONFIG = prepare(config, Path("results"))

FIXTURE = "results/fixtures/{fixture}"
FIXTURE_SPEC = f"{FIXTURE}/{SPEC}"
FIXTURE_TENSORS = [f"{FIXTURE}/{name}" for name in TENSOR_FILES]
STUDY = "results/route_block/{fixture}/{lane}/{point}/{plan_source}"
STUDY_LOG = "results/logs/route_block/{fixture}/{lane}/{point}/{plan_source}"
RUN = f"{STUDY}/{{cell}}/{{history}}/rep{{n}}"

# What config.yaml asks for.
STUDIES = dict(
    fixture=[str(CONFIG.fixture.name)],
    lane=[str(lane) for lane in CONFIG.lanes],
    point=[str(point) for point in CONFIG.points],
    plan_source=[str(source) for source in CONFIG.plan_source],
)

OWN_GEOMETRY = [name for name in STUDIES["fixture"] if name == "published_geometry"]


def all_runs(wildcards):
    """Everything that the scorer reads of the runs of one study: of the cells that its fixture has exchange pairs for."""
    cells = CELLS
    if wildcards.fixture == "checkpoint":
        with open(checkpoints.checkpoint_fixture.get().output.spec) as spec:
            cells = cells_of(json.load(spec)["exchange"])
    return expand(
        f"{RUN}/{{file}}",
        cell=cells,
        history=HISTORIES,
        n=range(1, CONFIG.replicates + 1),
        file=[RECORD, RECORD_MANIFEST, TENSORS],
        **wildcards,
    )
