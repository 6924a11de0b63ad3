# What the study ran on. It differs between machines, so it is no input of any other rule.


rule environment:
    input:
        pins="envs/base.txt",
    output:
        record="results/environment/environment.json",
        manifest="results/environment/environment.manifest.json",
    log:
        "results/logs/environment.log",
    params:
        code=code("routeblock.environment"),
    shell:
        "routeblock environment --out $(dirname {output.record}) --pins {input.pins} 2> {log}"


# For the lane cuda, where config.yaml names .venv-cuda/bin/python.
rule cuda_environment:
    input:
        pins="envs/cuda.txt",
    output:
        stamp=MADE_STAMP,
    log:
        "results/logs/cuda_environment.log",
    params:
        python=MADE_PYTHON,
    shell:
        "(python3.12 -m venv $(dirname {output.stamp}) && {params.python} -m pip install --disable-pip-version-check"
        " --requirement {input.pins} && {params.python} -m pip freeze > {output.stamp}) > {log} 2>&1"
