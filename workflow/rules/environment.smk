# SPDX-License-Identifier: Apache-2.0
# What the study ran on. It differs between machines, so it is no input of any other rule.


rule environment:
    input:
        pins="envs/base.txt",
    output:
        record="results/environment/environment.json",
        manifest="results/environment/environment.manifest.json",
    log:
        "results/logs/environment.log",
    localrule: True
    params:
        out=subpath(output.record, parent=True),
        code=code("routeblock.environment"),
    shell:
        "routeblock workflow environment --out {params.out:q} --pins {input.pins:q} 2> {log:q}"


# For the lane cuda, where config.yaml names .venv-cuda/bin/python.
rule cuda_environment:
    input:
        pins="envs/cuda.txt",
    output:
        stamp=MADE_STAMP,
    log:
        "results/logs/cuda_environment.log",
    localrule: True
    params:
        venv=subpath(output.stamp, parent=True),
        python=MADE_PYTHON,
    shell:
        "(python3.12 -m venv {params.venv:q} && {params.python} -m pip install --disable-pip-version-check"
        " --requirement {input.pins:q} && {params.python} -m pip freeze > {output.stamp:q}) > {log:q} 2>&1"
