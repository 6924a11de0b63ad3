# Frozen before any arithmetic. The superseded one is a control: it is refused.


rule prediction:
    input:
        multiext("results/fixtures/{fixture}/", *FIXTURE_FILES),
    output:
        prediction=STUDY + "/prediction.json",
        manifest=STUDY + "/prediction.manifest.json",
    log:
        LOG + "/prediction.log",
    params:
        code=code("prediction"),
    shell:
        "routeblock predict --fixture $(dirname {input[0]}) --lane {wildcards.lane} --point {wildcards.point}"
        " --plan-source {wildcards.plan_source} --out {output.prediction} 2> {log}"


rule superseded_prediction:
    input:
        multiext("results/fixtures/{fixture}/", *FIXTURE_FILES),
    output:
        prediction=STUDY + "/superseded.json",
        manifest=STUDY + "/superseded.manifest.json",
    log:
        LOG + "/superseded.log",
    params:
        code=code("prediction"),
    shell:
        "routeblock predict --superseded --fixture $(dirname {input[0]}) --lane {wildcards.lane}"
        " --point {wildcards.point} --plan-source {wildcards.plan_source} --out {output.prediction} 2> {log}"


rule control:
    input:
        multiext("results/fixtures/{fixture}/", *FIXTURE_FILES),
        prediction=STUDY + "/superseded.json",
    output:
        control=STUDY + "/control.json",
        manifest=STUDY + "/control.manifest.json",
    log:
        LOG + "/control.log",
    params:
        code=code("control"),
    shell:
        "routeblock control --fixture $(dirname {input[0]}) --prediction {input.prediction}"
        " --lane {wildcards.lane} --out {output.control} 2> {log}"
