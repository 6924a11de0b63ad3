# SPDX-License-Identifier: Apache-2.0
# Why bits differ, what changes them, and which launch made them: a target of its own (`make diagnosis`), not part of the
# study. `explain` and `witness` ask the twins about the fixture; `identify` is given the outputs of a run of any lane.

DIAGNOSIS = "results/diagnosis/{fixture}/{lane}/{point}"
DIAGNOSIS_LOG = "results/logs/diagnosis/{fixture}/{lane}/{point}"
TWINS = [place for place in STUDY_A.places if place["lane"].startswith("twin-")]
# One run stands for each place: a replay, whose plan is among those that are tried (a GPU's own alignment need not be).
IDENTIFIED = [place for place in STUDY_A.places if place["lane"] in EVIDENCE] + TWINS
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
    resources:
        **LONG,
    params:
        fixture=subpath(input.spec, parent=True),
        code=code("routeblock.diagnose.answers", "routeblock.diagnose.explain_drawings"),
    shell:
        "routeblock explain --fixture {params.fixture:q} --lane {wildcards.lane} --point {wildcards.point}"
        " --first plan=H0 --second plan=H1 --out {output.answer:q} --exit-zero > {log:q} 2>&1"


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
    resources:
        **LONG,
    params:
        fixture=subpath(input.spec, parent=True),
        code=code("routeblock.diagnose.answers"),
    shell:
        "routeblock witness --fixture {params.fixture:q} --lane {wildcards.lane} --point {wildcards.point}"
        " --surface final --run plan=canonical --out {output.answer:q} --exit-zero > {log:q} 2>&1"


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
    resources:
        **LONG,
    params:
        fixture=subpath(input.spec, parent=True),
        run=subpath(input.record, parent=True),
        tensors=TENSORS,
        plans=plans_option,
        surface="w13",
        code=code("routeblock.diagnose.answers"),
    shell:
        "routeblock identify --fixture {params.fixture:q} --outputs {params.run:q}/{params.tensors}"
        " {params.plans} --surface {params.surface} --out {output.answer:q} --exit-zero > {log:q} 2>&1"


DIAGNOSES = {
    "explain": list(dict.fromkeys(rules.explain.output.answer.format(**place) for place in TWINS)),
    "witness": list(dict.fromkeys(rules.witness.output.answer.format(**place) for place in TWINS)),
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
        localrule: True
        params:
            out=subpath(output.manifest, parent=True),
            name=name,
            sources=[f"--from {answer}" for answer in answers],
            code=code("routeblock.diagnose.explain_tables"),
        shell:
            "routeblock diagnose table {params.name} {params.sources} --out {params.out:q} 2> {log:q}"


rule figure_explain:
    input:
        answer=DIAGNOSES["explain"][:1],
    output:
        drawn=multiext("results/figures/explain", ".svg", ".png", ".dot"),
        manifest="results/figures/explain.manifest.json",
    log:
        "results/logs/figures/explain.log",
    localrule: True
    params:
        out=subpath(output.manifest, parent=True),
        code=code("routeblock.diagnose.explain_drawings"),
    shell:
        "routeblock diagnose draw --from {input.answer:q} --out {params.out:q} 2> {log:q}"


rule diagnosis:
    input:
        [f"results/tables/{name}.md" for name in DIAGNOSES],
        rules.figure_explain.output,
