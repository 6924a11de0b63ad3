# SPDX-License-Identifier: Apache-2.0
# What a GPU machine gives as evidence: every process of the configured studies, the censuses, the probe's control.


rule gpu_evidence:
    input:
        rules.environment.output,
        runs_on_gpu,
        expand(
            rules.census.output.census,
            history=HISTORIES,
            n=range(1, CONFIG.cuda.census.processes + 1),
            **(STUDIES | dict(lane=["cuda"])),
        ),
        expand(rules.unassisted.output.unassisted, **(STUDIES | dict(lane=["cuda"]))),


# Committed evidence as run folders again, bit for bit; from there on the rules are those of every lane. Of a run its record
# stands for the other files, whose digests it has, and no wildcard is left: most of a dry run's time went into these files.
for lane, groups in STUDY_A.recorded.items():
    for group, count in groups.items():
        kind, _, source = group.partition(".")
        home = Path(LANE.format(fixture=RECORDED_FIXTURE, lane=lane), *group.split("."))
        made = [f"{home}/restored.json", f"{home}/restored.manifest.json"]
        if count:
            numbers = range(1, count + 1)
            made += expand(
                f"{home}/{{cell}}/{{history}}/rep{{n}}/{RECORD}",
                cell=CELLS,
                history=HISTORIES,
                n=numbers,
            )
            made += [f"{home}/prediction.json", f"{home}/prediction.manifest.json"]
            made += [f"{home}/plans.safetensors"] if source == "captured" else []

        rule:
            name:
                f"restore_{lane}_{group}".replace("-", "_").replace(".", "_")
            input:
                spec=FIXTURE_SPEC.format(fixture=RECORDED_FIXTURE),
                tensors=expand(FIXTURE_TENSORS, fixture=RECORDED_FIXTURE),
                evidence=[f"{EVIDENCE[lane]}/{name}" for name in ("evidence.json", "tensors.xz", f"{group}.jsonl")],
            output:
                made,
            log:
                f"{LANE_LOG}/{group}.log".format(fixture=RECORDED_FIXTURE, lane=lane),
            resources:
                **SHORT,
            params:
                fixture=subpath(input.spec, parent=True),
                evidence=lambda wildcards, input: str(Path(input.evidence[0]).parent),
                group=group,
                out=subpath(output[0], parent=True),
                code=code("routeblock.route_block.runs.recorded"),
            shell:
                "routeblock study-a restore-evidence --fixture {params.fixture:q} --evidence {params.evidence:q}"
                " --group {params.group} --out {params.out} 2> {log:q}"
