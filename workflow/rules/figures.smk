# SPDX-License-Identifier: Apache-2.0
# Every figure, from its declaration (figures of its study): one rule each, named `figure_` and its name.


for target in FIGURES:

    rule:
        name:
            f"figure_{target.name}"
        input:
            target.inputs,
        output:
            figures=in_report(target, "Figures", ".svg", ".png", shown=".svg"),
            manifest=f"results/figures/{target.name}.manifest.json",
        log:
            f"results/logs/figures/{target.name}.log",
        localrule: True
        params:
            command=target.command,
            name=target.name,
            arguments=target.arguments,
            code=code(target.module),
        shell:
            "routeblock {params.command} {params.name} {params.arguments} --out results/figures 2> {log:q}"
