# SPDX-License-Identifier: Apache-2.0
# What the lane `cuda` preloads to set and record grids: built where it is used, from cuda/grid_probe.c.


rule probe:
    output:
        probe="results/probe/grid_probe.so",
        manifest="results/probe/grid_probe.manifest.json",
    log:
        "results/logs/probe.log",
    resources:
        **SHORT,
    params:
        code=code("routeblock.cuda.grid_probe"),
    shell:
        "routeblock gpu build-probe {output.probe:q} 2> {log:q}"
