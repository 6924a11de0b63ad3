# Why bits differ, what changes them, and which launch made them: a target of its own (`make diagnosis`), not part of the
# study. `explain` and `witness` ask the twins about the fixture; `identify` is given the outputs of a run of any lane.

DIAGNOSIS = "results/diagnosis/{fixture}/{lane}/{point}"
DIAGNOSIS_LOG = "results/logs/diagnosis/{fixture}/{lane}/{point}"
TWINS = [lane for lane in RUN_HERE if lane.startswith("twin-")]
# One run stands for each place: a replay, whose plan is among those that are tried (a GPU's own alignment need not be).
IDENTIFIED = [place for place in PLACES if place["lane"] in (*TWINS, *EVIDENCE)]
REPLAY = f"{STUDY}/replay/H0/rep1"


rule explain:
    input:
        spec=FIXTURE_SPEC,
        tensors=FIXTURE_TENSORS,
    output:
        answer=f"{DIAGNOSIS}/explain.json",
        manifest=f"{DIAGNOSIS}/explain.manifest.json",
    log:
        f"{DIAGNOSIS_LOG}/explain.log",
    wildcard_constraints:
        lane="twin-[a-z]+",
    params:
        code=code("explain"),
    shell:
        "routeblock explain --fixture $(dirname {input.spec}) --lane {wildcards.lane} --point {wildcards.point}"
        " --first plan=H0 --second plan=H1 --out {output.answer} --exit-zero > {log} 2>&1"


rule witness:
    input:
        spec=FIXTURE_SPEC,
        tensors=FIXTURE_TENSORS,
    output:
        answer=f"{DIAGNOSIS}/witness.json",
        manifest=f"{DIAGNOSIS}/witness.manifest.json",
    log:
        f"{DIAGNOSIS_LOG}/witness.log",
    wildcard_constraints:
        lane="twin-[a-z]+",
    params:
        code=code("witness"),
    shell:
        "routeblock witness --fixture $(dirname {input.spec}) --lane {wildcards.lane} --point {wildcards.point}"
        " --surface final --run plan=canonical --out {output.answer} --exit-zero > {log} 2>&1"


rule identify:
    input:
        spec=FIXTURE_SPEC,
        tensors=FIXTURE_TENSORS,
        record=f"{REPLAY}/{RECORD}",
        plans=captured_plans,
    output:
        answer=f"{DIAGNOSIS}/{{plan_source}}/identify.json",
        manifest=f"{DIAGNOSIS}/{{plan_source}}/identify.manifest.json",
    log:
        f"{DIAGNOSIS_LOG}/{{plan_source}}/identify.log",
    params:
        tensors=TENSORS,
        plans=plans_option,
        surface="w13",
        code=code("identify"),
    shell:
        "routeblock identify --fixture $(dirname {input.spec}) --outputs $(dirname {input.record})/{params.tensors}"
        " {params.plans} --surface {params.surface} --out {output.answer} --exit-zero > {log} 2>&1"


DIAGNOSES = {
    "explain": each(rules.explain.output.answer, TWINS),
    "witness": each(rules.witness.output.answer, TWINS),
    "identify": [rules.identify.output.answer.format(**place) for place in IDENTIFIED],
}

for name, answers in DIAGNOSES.items():

    rule:
        name:
            f"table_{name}"
        input:
            answers=answers,
        output:
            tables=multiext(f"results/tables/{name}", ".parquet", ".csv", ".md"),
            manifest=f"results/tables/{name}.manifest.json",
        log:
            f"results/logs/tables/{name}.log",
        params:
            name=name,
            sources=[f"--from {answer}" for answer in answers],
            code=code(f"table_{name}"),
        shell:
            "routeblock diagnosis-table {params.name} {params.sources} --out $(dirname {output.manifest}) 2> {log}"


rule figure_explain:
    input:
        answer=DIAGNOSES["explain"][:1],
    output:
        drawn=multiext("results/figures/explain", ".svg", ".png", ".dot"),
        manifest="results/figures/explain.manifest.json",
        dot="results/figures/explain_dot.manifest.json",
    log:
        "results/logs/figures/explain.log",
    params:
        code=code("figure_explain"),
    shell:
        "routeblock draw-explanation --from {input.answer} --out $(dirname {output.manifest}) 2> {log}"


rule diagnosis:
    input:
        [f"results/tables/{name}.md" for name in DIAGNOSES],
        rules.figure_explain.output,
