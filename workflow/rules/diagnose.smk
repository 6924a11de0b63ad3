# SPDX-License-Identifier: Apache-2.0
# Questions about a layer: predictions, launches on every GPU, and the survey, a scatter of one job a point.


SURVEYED_GPUS = by_path(CONFIG.survey.gpus)
POPULATIONS = by_path(CONFIG.survey.populations)
LAYER_OPTIONS = layer_options(CONFIG.survey)
DIAGNOSIS_RECORD = multiext("fixtures/recorded/diagnosis/h200/", "diagnosis.json", "registers.json", "contents.json")


# The layer's geometry and the fixture's routing on one GPU.
rule predict:
    input:
        routing=f"results/fixtures/{CONFIG.fixture.name}/{INPUTS}",
    output:
        answer="results/predict/{gpu}.json",
        manifest="results/predict/{gpu}.manifest.json",
    log:
        "results/logs/predict/{gpu}.log",
    resources:
        **SHORT,
    params:
        gpu=lambda wildcards: SURVEYED_GPUS[wildcards.gpu],
        vllm=CONFIG.survey.vllm,
        layer=LAYER_OPTIONS,
        code=code("routeblock.diagnose.predict", "routeblock.diagnose.question"),
    shell:
        "routeblock predict --gpu {params.gpu:q} --vllm {params.vllm} {params.layer} --routing {input.routing:q}"
        " --batches 1-21 --out {output.answer:q} --exit-zero > {log:q} 2>&1"


rule predictions:
    input:
        answers=expand(rules.predict.output.answer, gpu=SURVEYED_GPUS),
    output:
        tables=multiext("results/tables/predictions", ".parquet", ".csv", ".md"),
        manifest="results/tables/predictions.manifest.json",
    log:
        "results/logs/tables/predictions.log",
    localrule: True
    params:
        out=subpath(output.manifest, parent=True),
        code=code("routeblock.diagnose.predict_table"),
    shell:
        "routeblock diagnose predictions {input.answers:q} --out {params.out:q} 2> {log:q}"


rule launches:
    input:
        record=DIAGNOSIS_RECORD,
    output:
        tables=[
            f"results/tables/{name}.{end}" for name in ("launch_rule", "launches") for end in ("parquet", "csv", "md")
        ],
        manifests=multiext("results/tables/", "launch_rule.manifest.json", "launches.manifest.json"),
    log:
        "results/logs/tables/launches.log",
    localrule: True
    params:
        out=lambda wildcards, output: str(Path(output.manifests[0]).parent),
        vllm=CONFIG.survey.vllm,
        layer=LAYER_OPTIONS,
        record=lambda wildcards, input: str(Path(input.record[0]).parent),
        code=code("routeblock.diagnose.launch_tables", "routeblock.moe.marlin_launch"),
    shell:
        "routeblock diagnose launches --vllm {params.vllm} {params.layer} --record {params.record:q}"
        " --out {params.out:q} > {log:q} 2>&1"


# Launches, predictions and registers that were recorded on a GPU, derived and drawn again.
rule recorded_diagnosis:
    input:
        record=DIAGNOSIS_RECORD,
    output:
        tables=multiext("results/tables/prediction_check", ".parquet", ".csv", ".md"),
        manifest="results/tables/prediction_check.manifest.json",
    log:
        "results/logs/tables/prediction_check.log",
    localrule: True
    params:
        out=subpath(output.manifest, parent=True),
        source=lambda wildcards, input: str(Path(input.record[0]).parent),
        code=code("routeblock.diagnose.recorded", "routeblock.moe.marlin_launch"),
    shell:
        "routeblock diagnose recorded --source {params.source:q} --out {params.out:q} > {log:q} 2>&1"


rule survey_point:
    input:
        routing=CONFIG.survey.routing or [],
    output:
        point="results/survey/{gpu}/{population}/{tokens}.json",
        manifest="results/survey/{gpu}/{population}/{tokens}.manifest.json",
    log:
        "results/logs/survey/{gpu}/{population}/{tokens}.log",
    benchmark:
        "results/logs/survey/{gpu}/{population}/{tokens}.benchmark.tsv"
    resources:
        **LONG,
    params:
        gpu=lambda wildcards: SURVEYED_GPUS[wildcards.gpu],
        population=lambda wildcards: POPULATIONS[wildcards.population],
        routing=lambda wildcards, input: f"--routing {input.routing}" if input.routing else "",
        vllm=CONFIG.survey.vllm,
        layer=LAYER_OPTIONS,
        routings=CONFIG.survey.routings,
        sample=CONFIG.survey.sample,
        macs=CONFIG.survey.macs,
        seed=CONFIG.survey.seed,
        code=code("routeblock.diagnose.survey", "routeblock.diagnose.twin_sample"),
    shell:
        "routeblock diagnose survey-point --gpu {params.gpu:q} --vllm {params.vllm} {params.layer}"
        " --population {params.population} {params.routing} --tokens {wildcards.tokens} --routings {params.routings}"
        " --sample {params.sample} --macs {params.macs} --seed {params.seed} --out {output.point:q} > {log:q} 2>&1"


rule survey:
    input:
        points=expand(
            rules.survey_point.output.point, gpu=SURVEYED_GPUS, population=POPULATIONS, tokens=CONFIG.survey.tokens
        ),
    output:
        tables=multiext("results/survey/survey", ".parquet", ".csv", ".md", ".svg", ".png", "_answer.json"),
        manifest="results/survey/survey.manifest.json",
        figure="results/survey/figure_survey.manifest.json",
        answer="results/survey/survey_answer.manifest.json",
    log:
        "results/logs/survey.log",
    localrule: True
    params:
        out=subpath(output.manifest, parent=True),
        code=code("routeblock.diagnose.survey_table", "routeblock.diagnose.survey_answer"),
    shell:
        "routeblock survey {input.points:q} --out {params.out:q} --exit-zero > {log:q} 2>&1"
