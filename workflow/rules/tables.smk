# Study A's tables, each over all lanes and points of config.yaml.

SCORES = each(f"{STUDY}/score.json")
TABLE_SOURCES = {
    "geometry": each(FIXTURE_SPEC),
    "trajectories": SCORES,
    "relations": SCORES,
    "studies": SCORES,
    "differences": SCORES,
    "mutations": each(f"{STUDY}/mutations.json"),
    "prediction": RANDOM_PLANS,
}
# What only a GPU fills, from this machine's or from evidence.
if ON_GPU:
    TABLE_SOURCES |= {
        "agreement": each(rules.agreement.output.agreement, ON_GPU),
        "census": each(rules.census_summary.output.summary, ON_GPU),
        "probe_control": each(rules.probe_control.output.comparison, ON_GPU),
    }
if "recorded-h200" in STUDIES["lane"]:
    TABLE_SOURCES |= {
        "history": [rules.recorded_native.output.summary],
        "repetition": [rules.recorded_native.output.summary],
        "operator": [rules.recorded_operator.output.summary],
    }
if rules.versions.input.results:
    TABLE_SOURCES["versions"] = [rules.versions.output.versions]

for name, sources in TABLE_SOURCES.items():

    rule:
        name:
            f"table_{name}"
        input:
            sources=sources,
            published="fixtures/published/route_block.json",
        output:
            tables=tables(name, STUDY_A),
            manifest=f"results/tables/{name}.manifest.json",
        log:
            f"results/logs/tables/{name}.log",
        params:
            name=name,
            sources=[f"--from {source}" for source in sources],
            code=code(f"table_{name}"),
        shell:
            "routeblock table {params.name} {params.sources} --published {input.published}"
            " --out $(dirname {output.manifest}) 2> {log}"
