from pathlib import Path

from routeblock.evidence.record import RECORD, RECORD_MANIFEST, TELEMETRY, TELEMETRY_MANIFEST, TENSORS
from routeblock.route_block.cells import CELLS, HISTORIES, position
from routeblock.route_block.fixture import SPEC, TENSOR_FILES
from routeblock.workflow import code, prepare

CONFIG = prepare(config, Path("results"))
STUDY = "results/route_block/{fixture}/{lane}/{point}/{plan_source}"
LOG = "results/logs/route_block/{fixture}/{lane}/{point}/{plan_source}"
RUN = STUDY + "/{cell}/{history}/rep{n}"
FIXTURE_FILES = (SPEC, *TENSOR_FILES, "fixture.manifest.json")
RUN_FILES = (RECORD, TENSORS, TELEMETRY, RECORD_MANIFEST, TELEMETRY_MANIFEST)
