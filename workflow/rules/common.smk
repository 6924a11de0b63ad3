import json
from pathlib import Path

from routeblock.evidence.manifest import SUFFIX
from routeblock.evidence.record import RECORD, RECORD_MANIFEST, TELEMETRY, TELEMETRY_MANIFEST, TENSORS
from routeblock.route_block.facts import CELLS, HISTORIES, cells_of, gpu_of, position, predecessor
from routeblock.route_block.fixtures.fixture import SPEC, TENSOR_FILES
from routeblock.alignment_cost import targets as alignment
from routeblock.grouped_schedule import targets as grouped
from routeblock.q6k_dispatch import targets as fast_paths
from routeblock.rule_code import FIGURES, checkpoint_arguments, code, prepare, recorded

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
IDENTITY = "results/identity/{lane}/identity.json"

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


def expected_identity(wildcards):
    """What was expected to compute: frozen before the first run here; beside recorded evidence, committed apart from it."""
    return f"{EVIDENCE[wildcards.lane]}/identity.json" if wildcards.lane in EVIDENCE else IDENTITY.format(**wildcards)


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
RECORDED_FIXTURE = "published_geometry"
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
    dict(zip(("fixture", "lane", "point", "plan_source"), (RECORDED_FIXTURE, lane, *group.split("."))))
    for lane in STUDIES["lane"]
    for group, count in RECORDED.get(lane, {}).items()
    if count
]


CAPTURED = [place for place in PLACES if place["plan_source"] == "captured"]

# How Snakemake's report groups tables and figures.
STUDY_A, STUDY_B = "Study A: route blocks", "Study B: grouped schedules"
ALIGNMENT_COST, FAST_PATHS = "Canonical alignment", "Fast paths"


def each(patterns, lanes=STUDIES["lane"]):
    """The file of each study, lane or fixture that a pattern (or each of several) names, once."""
    patterns = [patterns] if isinstance(patterns, str) else patterns
    places = [place for place in PLACES if place["lane"] in lanes]
    return list(dict.fromkeys(pattern.format(**place) for pattern in patterns for place in places))


def surfaces(**runs):
    """The tensors of some runs of every study; of recorded runs the records, which stand for them."""
    return [
        file
        for name, lanes in ((TENSORS, RUN_HERE), (RECORD, EVIDENCE))
        for file in each(expand(f"{RUN}/{name}", allow_missing=True, **runs), lanes)
    ]


def tables(name, study):
    """The files of a table; Snakemake's report shows the csv under its caption."""
    caption, labels = f"../report/table_{name}.rst", {"table": name}
    parquet, plain, markdown = multiext(f"results/tables/{name}", ".parquet", ".csv", ".md")
    return [parquet, report(plain, caption=caption, category=study, subcategory="Tables", labels=labels), markdown]


def figures(name, study):
    """The files of a figure; Snakemake's report shows the svg under its caption."""
    caption, labels = f"../report/figure_{name}.rst", {"figure": name}
    drawn, pixels = multiext(f"results/figures/{name}", ".svg", ".png")
    return [report(drawn, caption=caption, category=study, subcategory="Figures", labels=labels), pixels]


def replicates(wildcards):
    groups = RECORDED.get(wildcards.lane)
    return CONFIG.replicates if groups is None else groups.get(f"{wildcards.point}.{wildcards.plan_source}", 1)


def cells(study):
    """The cells of a study: those that there are exchange pairs for, in its captured plans or in its fixture."""
    if study["lane"] == "cuda" and study["plan_source"] == "captured":
        return runnable(checkpoints.captured_prediction.get(**study).output.prediction)
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
    """Everything that the scorer reads of the runs of one study; of recorded runs the records, as their rule has it."""
    files = [RECORD] if wildcards.lane in EVIDENCE else [RECORD, RECORD_MANIFEST, TENSORS, TELEMETRY]
    return runs_of(dict(wildcards), files, replicates(wildcards))


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
    """Higher for what starts earlier: study by study, in each the GPUs in turn, on each GPU the order of the study."""
    study = STUDY_ORDER.index((wildcards.point, wildcards.plan_source))
    gpus, n, one = CONFIG.cuda.gpus, int(wildcards.n), PROCESSES // CONFIG.replicates
    before = (n - 1) // gpus * one + position(wildcards.cell, wildcards.history, n) % one
    return (len(STUDY_ORDER) - study) * (PROCESSES + one) * gpus - (before * gpus + gpu_of(n, gpus))


def processes(wildcards):
    """The files of a census: of the configured size, or as many as were recorded."""
    if wildcards.lane in EVIDENCE:
        return f"{POINT}/census/restored.json".format(**wildcards)
    numbers = range(1, CONFIG.cuda.census.processes + 1)
    return expand(f"{POINT}/census/{{history}}/process{{n}}.json", history=HISTORIES, n=numbers, **wildcards)


def named(prefix):
    """What the rules defined so far are called after this prefix: `table_` gives the tables."""
    return [r.name.removeprefix(prefix) for r in workflow.rules if r.name.startswith(prefix)]


def reported():
    """The tables of the report. The prediction's takes minutes: it is in the report once it was asked for."""
    return [n for n in named("table_") if n != "prediction" or Path("results/tables/prediction.manifest.json").exists()]


def seals_of(sources):
    """The manifest of each document."""
    return [str(Path(source).with_suffix(SUFFIX)) for source in sources]
