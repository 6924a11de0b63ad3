# SPDX-License-Identifier: Apache-2.0
# The layer, its routed inputs and the two stored plans.


rule fixture:
    output:
        spec=FIXTURE_SPEC.format(fixture="published_geometry"),
        tensors=expand(FIXTURE_TENSORS, fixture="published_geometry"),
        manifest=f"{FIXTURE}/fixture.manifest.json".format(fixture="published_geometry"),
    log:
        "results/logs/fixture/published_geometry.log",
    resources:
        **SHORT,
    params:
        out=subpath(output.spec, parent=True),
        seed=CONFIG.fixture.seed,
        code=code("routeblock.route_block.fixtures.make"),
    shell:
        "routeblock study-a fixture --name published_geometry --seed {params.seed} --out {params.out:q} 2> {log:q}"


# Whether there are exchange pairs, and so which cells run, is known once this is made.
checkpoint checkpoint_fixture:
    input:
        files=rules.manifest.output.files,
        captured=[CONFIG.checkpoint.captured] if CONFIG.checkpoint.captured else [],
    output:
        spec=FIXTURE_SPEC.format(fixture="checkpoint"),
        tensors=expand(FIXTURE_TENSORS, fixture="checkpoint"),
        manifest=f"{FIXTURE}/fixture.manifest.json".format(fixture="checkpoint"),
    log:
        "results/logs/fixture/checkpoint.log",
    resources:
        **LONG,
    params:
        out=subpath(output.spec, parent=True),
        path=CONFIG.checkpoint.path,
        arguments=checkpoint_arguments(CONFIG),
        code=code("routeblock.route_block.fixtures.from_checkpoint"),
    shell:
        "routeblock checkpoint fixture {params.path:q} --manifest {input.files:q} --out {params.out:q}"
        " {params.arguments} 2> {log:q}"
