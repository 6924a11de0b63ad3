# SPDX-License-Identifier: Apache-2.0
import json
import shlex
from pathlib import Path

from routeblock.alignment_cost import targets as alignment
from routeblock.diagnose.targets import by_path, layer_options
from routeblock.evidence.digest import PACKAGE_ROOT
from routeblock.evidence.digest import code_digest as code
from routeblock.evidence.manifest import SUFFIX
from routeblock.evidence.record import RECORD, RECORD_MANIFEST, TELEMETRY, TELEMETRY_MANIFEST, TENSORS
from routeblock.grouped_schedule import targets as grouped
from routeblock.q6k_dispatch import targets as fast_paths
from routeblock.route_block.facts import CELLS, HISTORIES, cells_of, gpu_of, position, predecessor
from routeblock.route_block.fixtures.fixture import INPUTS, SPEC, TENSOR_FILES
from routeblock.route_block.paths import FIXTURE, IDENTITY, LANE, LANE_LOG, POINT, RUN, STUDY, STUDY_LOG
from routeblock.route_block.runs.cuda import CudaLane
from routeblock.route_block.targets import EVIDENCE, RECORDED_FIXTURE, StudyA, versions
from routeblock.rule_code import checkpoint_arguments, prepare
from routeblock.serving import targets as serving

CONFIG = prepare(config, Path("results"), where=SETTINGS)
STUDY_A = StudyA(CONFIG)
TABLES = [*STUDY_A.tables(), *alignment.tables(), *grouped.tables(CONFIG), *fast_paths.tables(), *serving.tables()]
FIGURES = [*STUDY_A.figures(), *alignment.figures(), *grouped.figures(), *serving.figures()]

FIXTURE_SPEC = f"{FIXTURE}/{SPEC}"
FIXTURE_TENSORS = [f"{FIXTURE}/{name}" for name in TENSOR_FILES]


# What every wildcard may be; a rule that is for some of these alone narrows it.
wildcard_constraints:
    fixture="published_geometry|checkpoint",
    lane="[a-z0-9]+(-[a-z0-9]+)*",
    point="published|auto",
    plan_source="stored|captured",
    cell="|".join(CELLS),
    history="|".join(HISTORIES),
    n="[1-9][0-9]*",
    device="[cg]pu[0-9]+",
    kind="sweep|confirmation|beyond",
    arch="sm_[0-9]+[a-z]?",
    recording="|".join(grouped.RECORDINGS),


# What a job asks a cluster for: minutes and MB. In the default study on 2 cores, by Snakemake's benchmarks, no SHORT job took
# more than 140 s and 600 MB. LONG is a guess, and generous: jobs on a GPU, of a checkpoint's size, or as long as asked for.
SHORT = dict(runtime=10, mem_mb=2000)
LONG = dict(runtime=60, mem_mb=4000)

# How a lane's commands are started: on the lane cuda by an interpreter with torch, from this checkout's package.
CUDA_PYTHON = CONFIG.cuda.python
PACKAGE_FOLDER = str(PACKAGE_ROOT.parent) if DEPLOYED else "workflow"
ON_CUDA = (
    f"PYTHONPATH={shlex.quote(PACKAGE_FOLDER)}${{PYTHONPATH:+:$PYTHONPATH}} {shlex.quote(CUDA_PYTHON)} -m routeblock"
    if CUDA_PYTHON
    else "routeblock"
)
# That interpreter is made where it is missing or its pins changed; any other is given.
MADE_PYTHON, MADE_STAMP = ".venv-cuda/bin/python", ".venv-cuda/stamp"


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


def beside_identity(wildcards):
    """What the scorer reads beside the expected identity: its seal, or the index of the evidence and the lines it names."""
    if wildcards.lane not in EVIDENCE:
        return IDENTITY.format(**wildcards).replace(".json", SUFFIX)
    return [
        f"{EVIDENCE[wildcards.lane]}/{name}"
        for name in ("evidence.json", "{point}.{plan_source}.jsonl".format(**wildcards))
    ]


def plans_option(wildcards, input):
    return f"--plans {input.plans}" if input.plans else ""


# What config.yaml asks for.
STUDIES = dict(
    fixture=[STUDY_A.fixture],
    lane=STUDY_A.lanes,
    point=[str(point) for point in CONFIG.points],
    plan_source=[str(source) for source in CONFIG.plan_source],
)
OWN_GEOMETRY = [name for name in STUDIES["fixture"] if name == "published_geometry"]


def in_report(target, kind, *suffixes, shown):
    """The files of a table or figure; Snakemake's report shows one of them under its caption."""
    what = kind.lower().removesuffix("s")
    caption, labels = f"../report/{what}_{target.name}.rst", {what: target.name}
    shelf = dict(caption=caption, category=target.category, subcategory=kind, labels=labels)
    files = {suffix: f"results/{kind.lower()}/{target.name}{suffix}" for suffix in suffixes}
    return [report(file, **shelf) if suffix == shown else file for suffix, file in files.items()]


def replicates(wildcards):
    return STUDY_A.replicates(wildcards)


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
    files = (
        [RECORD] if wildcards.lane in EVIDENCE else [RECORD, RECORD_MANIFEST, TENSORS, TELEMETRY, TELEMETRY_MANIFEST]
    )
    return runs_of(dict(wildcards), files, replicates(wildcards))


def runs_on_gpu(_):
    """The record of every run that config.yaml asks this machine's GPU for."""
    places = (dict(fixture=STUDY_A.fixture, lane="cuda", point=p, plan_source=source) for p, source in STUDY_A.order)
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
    return STUDY_A.start_order(wildcards, wildcards.cell, wildcards.history, int(wildcards.n))


def processes(wildcards):
    """The files of a census: of the configured size, or as many as were recorded."""
    if wildcards.lane in EVIDENCE:
        return f"{POINT}/census/restored.json".format(**wildcards)
    numbers = range(1, CONFIG.cuda.census.processes + 1)
    return expand(f"{POINT}/census/{{history}}/process{{n}}.json", history=HISTORIES, n=numbers, **wildcards)


def reported():
    """The tables of the report. The prediction's takes minutes: it is in the report once it was asked for."""
    asked = Path("results/tables/prediction.manifest.json").exists()
    return [target for target in TABLES if target.name != "prediction" or asked]
