# SPDX-License-Identifier: Apache-2.0
# Random legal plans against the prediction: a target of its own (`make prediction`), not part of the study.


rule random_plans:
    input:
        spec=FIXTURE_SPEC,
        tensors=FIXTURE_TENSORS,
    output:
        plans="results/random_plans/{fixture}/{lane}.json",
        manifest="results/random_plans/{fixture}/{lane}.manifest.json",
    log:
        "results/logs/random_plans/{fixture}/{lane}.log",
    benchmark:
        "results/logs/random_plans/{fixture}/{lane}.benchmark.tsv"
    threads: workflow.cores
    resources:
        **LONG,
    params:
        fixture=subpath(input.spec, parent=True),
        plans=200,
        seed=1,
        code=code("routeblock.route_block.prediction.random_plans"),
    shell:
        "routeblock study-a random-plans --fixture {params.fixture:q} --lane {wildcards.lane} --plans {params.plans} --seed {params.seed} --out {output.plans:q} > {log:q} 2>&1"
