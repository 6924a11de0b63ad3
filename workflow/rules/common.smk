import json
from pathlib import Path

from routeblock.evidence.record import RECORD, RECORD_MANIFEST, TELEMETRY, TELEMETRY_MANIFEST, TENSORS
from routeblock.route_block.cells import CELLS, HISTORIES, cells_of, gpu_of, position, predecessor
from routeblock.route_block.fixture import SPEC, TENSOR_FILES
from routeblock.alignment_cost import wiring as alignment
from routeblock.grouped_schedule import wiring as grouped
from routeblock.q6k_dispatch import wiring as fast_paths
from routeblock.workflow import checkpoint_arguments, code, prepare, recorded

CONFIG = prepare(config, Path("results"))

FIXTURE = "results/fixtures/{fixture}"
FIXTURE_SPEC = f"{FIXTURE}/{SPEC}"
FIXTURE_TENSORS = [f"{FIXTURE}/{name}" for name in TENSOR_FILES]
LANE = "results/route_block/{fixture}/{lane}"
POINT = f"{LANE}/{{point}}"
LANE_LOG = "results/logs/route_block/{fixture}/{lane}"
STUDY = "results/route_block/{fixture}/{lane}/{point}/{plan_source}"
STUDY_LOG = "results/logs/route_block/{fixture}/{lane}/{point}/{plan_source}"
RUN = f"{STUDY}/{{cell}}/{{history}}/rep{{n}}"

# How a lane's commands are started: on the lane cuda by an interpreter with torch, from this checkout's package.
CUDA_PYTHON = CONFIG.cuda.python
ON_CUDA = (
    f"PYTHONPATH=workflow${{PYTHONPATH:+:$PYTHONPATH}} {CUDA_PYTHON} -m routeblock" if CUDA_PYTHON else "routeblock"
)
# That interpreter is made where it is missing or its pins changed; any other is given.
MADE_PYTHON, MADE_STAMP = ".venv-cuda/bin/python", ".venv-cuda/stamp"
PROCESSES = len(CELLS) * len(HISTORIES) * CONFIG.replicates


def routeblock(wildcards):
    return ON_CUDA if wildcards.lane == "cuda" else "routeblock"


def interpreter(wildcards):
    """What has to be there before a command of the lane is started."""
    return MADE_STAMP if wildcards.lane == "cuda" and CUDA_PYTHON == MADE_PYTHON else []


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

OWN_GEOMETRY = [name for name in STUDIES["fixture"] if name == "published_geometry"]
STUDY_ORDER = [(point, source) for point in STUDIES["point"] for source in STUDIES["plan_source"]]

# Committed evidence from a GPU, by lane; a study there has as many replicates as were recorded.
EVIDENCE = {"recorded-h200": "fixtures/recorded/h200-vllm0.24.0"}
RECORDED = {lane: recorded(Path(folder)) for lane, folder in EVIDENCE.items()}
RUN_HERE = [lane for lane in STUDIES["lane"] if lane not in EVIDENCE]
ON_GPU = [lane for lane in STUDIES["lane"] if not lane.startswith("twin-")]

# Every study of every lane: here what config.yaml asks for, of recorded lanes all that was recorded, on its own fixture.
PLACES = [
    dict(fixture=fixture, lane=lane, point=point, plan_source=source)
    for fixture in STUDIES["fixture"]
    for lane in RUN_HERE
    for point, source in STUDY_ORDER
]
PLACES += [
    dict(zip(("fixture", "lane", "point", "plan_source"), ("published_geometry", lane, *group.split("."))))
    for lane in STUDIES["lane"]
    for group, count in RECORDED.get(lane, {}).items()
    if count
]


def each(pattern, lanes=STUDIES["lane"]):
    """The file of each study, lane or fixture that `pattern` names, once."""
    return list(dict.fromkeys(pattern.format(**place) for place in PLACES if place["lane"] in lanes))


def replicates(wildcards):
    groups = RECORDED.get(wildcards.lane)
    return CONFIG.replicates if groups is None else groups.get(f"{wildcards.point}.{wildcards.plan_source}", 1)


def cells(study):
    """The cells of a study: those that there are exchange pairs for, in its captured plans or in its fixture."""
    if study["lane"] == "cuda" and study["plan_source"] == "captured":
        return runnable(checkpoints.prediction.get(**study).output.prediction)
    if study["fixture"] == "checkpoint":
        return runnable(checkpoints.checkpoint_fixture.get().output.spec)
    return list(CELLS)


def runnable(document):
    """The cells that a fixture, or a prediction, has exchange pairs for."""
    return cells_of(json.loads(Path(document).read_bytes())["exchange"])


def runs_of(study, files, count):
    """Files of every run of a study: `count` replicates of each of its cells."""
    numbers = range(1, count + 1)
    return expand(f"{RUN}/{{file}}", cell=cells(study), history=HISTORIES, n=numbers, file=files, **study)


def all_runs(wildcards):
    """Everything that the scorer reads of the runs of one study."""
    return runs_of(dict(wildcards), [RECORD, RECORD_MANIFEST, TENSORS], replicates(wildcards))


def runs_on_gpu(_):
    """The record of every run that config.yaml asks this machine's GPU for."""
    places = [
        dict(fixture=fixture, lane="cuda", point=point, plan_source=source)
        for fixture in STUDIES["fixture"]
        for point, source in STUDY_ORDER
    ]
    return [run for place in places for run in runs_of(place, RECORD, CONFIG.replicates)]


def after(wildcards, input):
    """The run that has this one's GPU before it: waited for, and no input, so that one rerun makes no others."""
    run_here = runnable(input.prediction) if Path(input.prediction).exists() else CELLS
    before = predecessor(wildcards.cell, wildcards.history, int(wildcards.n), CONFIG.cuda.gpus, run_here)
    if before is None:
        return ""
    cell, history, n = before
    return f"--after {RUN}/{RECORD}".format(**(dict(wildcards) | dict(cell=cell, history=history, n=n)))


def start_order(wildcards):
    """Higher for what starts earlier."""
    study = STUDY_ORDER.index((wildcards.point, wildcards.plan_source))
    place = position(wildcards.cell, wildcards.history, int(wildcards.n))
    return (len(STUDY_ORDER) - study) * PROCESSES - place


def processes(wildcards):
    """The files of a census: of the configured size, or as many as were recorded."""
    if wildcards.lane in EVIDENCE:
        return f"{POINT}/census/restored.json".format(**wildcards)
    numbers = range(1, CONFIG.cuda.census.processes + 1)
    return expand(f"{POINT}/census/{{history}}/process{{n}}.json", history=HISTORIES, n=numbers, **wildcards)
