# SPDX-License-Identifier: Apache-2.0
# Frozen before any arithmetic, and an input of every run. The superseded one is a control: no run starts from it.


rule prediction:
    input:
        spec=FIXTURE_SPEC,
        tensors=FIXTURE_TENSORS,
        interpreter=interpreter,
    output:
        prediction=f"{STUDY}/{{frozen}}.json",
        manifest=f"{STUDY}/{{frozen}}.manifest.json",
    log:
        f"{STUDY_LOG}/{{frozen}}.log",
    wildcard_constraints:
        lane="twin-[a-z]+|cuda",
        plan_source="stored",
        frozen="prediction|superseded",
    resources:
        **SHORT,
    params:
        fixture=subpath(input.spec, parent=True),
        routeblock=routeblock,
        superseded=lambda wildcards: "--superseded" if wildcards.frozen == "superseded" else "",
        code=code("routeblock.route_block.prediction.freeze"),
    shell:
        "{params.routeblock} study-a freeze {params.superseded} --fixture {params.fixture:q} --lane {wildcards.lane} --point {wildcards.point}"
        " --plan-source {wildcards.plan_source} --out {output.prediction:q} 2> {log:q}"


# Of captured plans it says which exchanges there can be, and so which cells run. Only here a checkpoint: after one, and on
# every later run, Snakemake works out anew all that depends on it.
checkpoint captured_prediction:
    input:
        spec=FIXTURE_SPEC,
        tensors=FIXTURE_TENSORS,
        plans=rules.captured_plans.output.plans,
        interpreter=interpreter,
    output:
        prediction=f"{STUDY}/prediction.json",
        manifest=f"{STUDY}/prediction.manifest.json",
    log:
        f"{STUDY_LOG}/prediction.log",
    wildcard_constraints:
        lane="cuda",
        plan_source="captured",
    resources:
        **SHORT,
    params:
        fixture=subpath(input.spec, parent=True),
        routeblock=routeblock,
        code=code("routeblock.route_block.prediction.freeze"),
    shell:
        "{params.routeblock} study-a freeze --plans {input.plans:q} --fixture {params.fixture:q} --lane {wildcards.lane} --point {wildcards.point}"
        " --plan-source {wildcards.plan_source} --out {output.prediction:q} 2> {log:q}"


rule control:
    input:
        spec=FIXTURE_SPEC,
        tensors=FIXTURE_TENSORS,
        prediction=f"{STUDY}/superseded.json",
    output:
        control=f"{STUDY}/control.json",
        manifest=f"{STUDY}/control.manifest.json",
    log:
        f"{STUDY_LOG}/control.log",
    resources:
        **SHORT,
    params:
        fixture=subpath(input.spec, parent=True),
        code=code("routeblock.route_block.runs.negative_control"),
    shell:
        "routeblock study-a control --fixture {params.fixture:q} --prediction {input.prediction:q} --lane {wildcards.lane}"
        " --out {output.control:q} 2> {log:q}"
