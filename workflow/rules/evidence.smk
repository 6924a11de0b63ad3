# What a GPU machine gives as evidence: every process of the configured studies, the censuses, the probe's control.


rule gpu_evidence:
    input:
        rules.environment.output,
        expand(
            f"{RUN}/{RECORD}",
            cell=CELLS,
            history=HISTORIES,
            n=range(1, CONFIG.replicates + 1),
            **(STUDIES | dict(lane=["cuda"])),
        ),
        expand(
            rules.census.output.census,
            history=HISTORIES,
            n=range(1, CONFIG.cuda.census.processes + 1),
            **(STUDIES | dict(lane=["cuda"])),
        ),
        expand(rules.probe_control.output.unassisted, **(STUDIES | dict(lane=["cuda"]))),
