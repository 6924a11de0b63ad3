# The layer, its routed inputs and the two stored plans.

rule fixture:
    output:
        multiext("results/fixtures/published_geometry/", *FIXTURE_FILES),
    log:
        "results/logs/fixture/published_geometry.log",
    params:
        seed=CONFIG.fixture.seed,
        code=code("fixture"),
    shell:
        "routeblock fixture --name published_geometry --seed {params.seed} --out $(dirname {output[0]}) 2> {log}"
