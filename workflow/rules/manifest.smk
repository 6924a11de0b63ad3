# SPDX-License-Identifier: Apache-2.0
# Which checkpoint it is. Its files lie outside the results: the manifest says what they were.


rule manifest:
    output:
        files="results/checkpoint/files.json",
        identity="results/checkpoint/identity.json",
        manifest="results/checkpoint/files.manifest.json",
    log:
        "results/logs/checkpoint/manifest.log",
    threads: workflow.cores
    resources:
        **LONG,
    params:
        out=subpath(output.files, parent=True),
        path=CONFIG.checkpoint.path,
        revision=["--revision", CONFIG.checkpoint.revision] if CONFIG.checkpoint.revision else [],
        layer=CONFIG.checkpoint.layer,
        code=code("routeblock.checkpoint.manifest"),
    shell:
        "routeblock checkpoint manifest {params.path:q} --out {params.out:q} --layer {params.layer}"
        " {params.revision:q} 2> {log:q}"
