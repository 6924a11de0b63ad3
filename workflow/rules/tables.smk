# SPDX-License-Identifier: Apache-2.0
# Every table, from its declaration (tables.py of its study): one rule each, named `table_` and its name.


for target in TABLES:

    rule:
        name:
            f"table_{target.name}"
        input:
            target.inputs,
        output:
            tables=in_report(target, "Tables", ".parquet", ".csv", ".md", shown=".csv"),
            manifest=f"results/tables/{target.name}.manifest.json",
        log:
            f"results/logs/tables/{target.name}.log",
        localrule: True
        params:
            command=target.command,
            name=target.name,
            arguments=target.arguments,
            code=code(target.module),
        shell:
            "routeblock {params.command} {params.name} {params.arguments} --out results/tables 2> {log:q}"
