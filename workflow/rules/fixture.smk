# The layer, its routed inputs and the two stored plans.


rule fixture:
    output:
        spec=FIXTURE_SPEC.format(fixture="published_geometry"),
        tensors=expand(FIXTURE_TENSORS, fixture="published_geometry"),
        manifest=f"{FIXTURE}/fixture.manifest.json".format(fixture="published_geometry"),
    log:
        "results/logs/fixture/published_geometry.log",
    params:
        seed=CONFIG.fixture.seed,
        code=code("fixture"),
    shell:
        "routeblock fixture --name published_geometry --seed {params.seed} --out $(dirname {output.spec}) 2> {log}"
