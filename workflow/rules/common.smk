from pathlib import Path

from routeblock.evidence.record import RECORD, RECORD_MANIFEST, TELEMETRY, TELEMETRY_MANIFEST, TENSORS
from routeblock.route_block.cells import CELLS, HISTORIES, gpu_of, position, predecessor
from routeblock.route_block.fixture import SPEC, TENSOR_FILES
from routeblock.grouped_schedule import wiring as grouped
from routeblock.workflow import code, prepare, recorded

CONFIG = prepare(config, Path("results"))

FIXTURE = "results/fixtures/{fixture}"
FIXTURE_SPEC = f"{FIXTURE}/{SPEC}"
FIXTURE_TENSORS = [f"{FIXTURE}/{name}" for name in TENSOR_FILES]
STUDY = "results/route_block/{fixture}/{lane}/{point}/{plan_source}"
STUDY_LOG = "results/logs/route_block/{fixture}/{lane}/{point}/{plan_source}"
RUN = f"{STUDY}/{{cell}}/{{history}}/rep{{n}}"

# How a lane's commands are started: on the lane cuda by an interpreter with torch, from this checkout's package.
CUDA_PYTHON = CONFIG.cuda.python
ON_CUDA = (
    f"PYTHONPATH=workflow${{PYTHONPATH:+:$PYTHONPATH}} {CUDA_PYTHON} -m routeblock" if CUDA_PYTHON else "routeblock"
)
WAIT_S = CONFIG.cuda.wait_s  # in no rule's params: how long to wait makes no other result
PROCESSES = len(CELLS) * len(HISTORIES) * CONFIG.replicates


def routeblock(wildcards):
    return ON_CUDA if wildcards.lane == "cuda" else "routeblock"


def captured_plans(wildcards):
    """The file of captured plans, where a study uses them."""
    return f"{STUDY}/plans.safetensors".format(**wildcards) if wildcards.plan_source == "captured" else []


def plans_option(wildcards, input):
    return f"--plans {input.plans}" if input.plans else ""


# What config.yaml asks for.
STUDIES = dict(
    fixture=[str(CONFIG.fixture.name)],
    lane=[str(lane) for lane in CONFIG.lanes],
    point=[str(point) for point in CONFIG.points],
    plan_source=[str(source) for source in CONFIG.plan_source],
)

STUDY_ORDER = [(point, source) for point in STUDIES["point"] for source in STUDIES["plan_source"]]

# Committed evidence from a GPU, by lane; a study there has as many replicates as were recorded.
EVIDENCE = {"recorded-h200": "fixtures/recorded/h200-vllm0.24.0"}
RECORDED = {lane: recorded(Path(folder)) for lane, folder in EVIDENCE.items()}
RUN_HERE = [lane for lane in STUDIES["lane"] if lane not in EVIDENCE]
ON_GPU = [lane for lane in STUDIES["lane"] if not lane.startswith("twin-")]


def replicates(wildcards):
    groups = RECORDED.get(wildcards.lane)
    return CONFIG.replicates if groups is None else groups.get(f"{wildcards.point}.{wildcards.plan_source}", 1)


def all_runs(wildcards):
    """Everything that the scorer reads of the runs of one study."""
    return expand(
        f"{RUN}/{{file}}",
        cell=CELLS,
        history=HISTORIES,
        n=range(1, replicates(wildcards) + 1),
        file=[RECORD, RECORD_MANIFEST, TENSORS],
        **wildcards,
    )
