# Figures of all studies, as .svg and .png, from tables and from what those were made from.


rule figure_partition:
    input:
        predictions=each(f"{STUDY}/prediction.json"),
        plans=[f"{STUDY}/plans.safetensors".format(**place) for place in CAPTURED],
        fixtures=each(FIXTURE_SPEC),
        tensors=each(FIXTURE_TENSORS),
    output:
        figures=figures("partition", STUDY_A),
        manifest="results/figures/partition.manifest.json",
    log:
        "results/logs/figures/partition.log",
    params:
        predictions=lambda wildcards, input: [f"--from {path}" for path in input.predictions],
        fixtures=lambda wildcards, input: [f"--fixture {Path(path).parent}" for path in input.fixtures],
        code=code("figure_partition"),
    shell:
        "routeblock figure partition {params.predictions} {params.fixtures} --out $(dirname {output.manifest}) 2> {log}"


rule figure_differences:
    input:
        table="results/tables/differences.parquet",
        scores=SCORES,
        # Replay stands for native where a GPU's own alignment did not repeat itself; the score says which it was.
        surfaces=surfaces(cell=["native", "replay"], history=HISTORIES, n=1),
    output:
        figures=figures("differences", STUDY_A),
        manifest="results/figures/differences.manifest.json",
    log:
        "results/logs/figures/differences.log",
    params:
        scores=[f"--from {score}" for score in SCORES],
        code=code("figure_differences"),
    shell:
        "routeblock figure differences {params.scores} --table {input.table} --out $(dirname {output.manifest}) 2> {log}"


# The others are drawn from the table of their name alone.
FROM_TABLES = {"trajectories": STUDY_A}
FROM_TABLES |= dict.fromkeys(grouped.FIGURES, STUDY_B) | dict.fromkeys(alignment.FIGURES, ALIGNMENT_COST)

for name, study in FROM_TABLES.items():

    rule:
        name:
            f"figure_{name}"
        input:
            table=f"results/tables/{name}.parquet",
        output:
            figures=figures(name, study),
            manifest=f"results/figures/{name}.manifest.json",
        log:
            f"results/logs/figures/{name}.log",
        params:
            name=name,
            code=code(f"figure_{name}"),
        shell:
            "routeblock figure {params.name} --from {input.table} --out $(dirname {output.manifest}) 2> {log}"
