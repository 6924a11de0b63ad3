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
        code=code("environment"),
    shell:
        "routeblock environment --out $(dirname {output.record}) --pins {input.pins} 2> {log}"
