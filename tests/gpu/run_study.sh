#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Study A on this machine's GPU, through the workflow, packed as evidence. From the checkout's root:
#
#     ROUTEBLOCK_EXTENSION=FILE OUT=FOLDER tests/gpu/run_study.sh [published] [auto]
#
# PYTHON     interpreter with torch, numpy, ml_dtypes, safetensors (default python3)
# SITE       a folder of further packages for it: snakemake, pydantic, typer ... (default none)
# QUEUE      processes that import and pack while one has the GPU (default 10)
# SOURCES    plan sources (default "stored, captured"); the first study is done before the next begins
# REPLICATES, CALLS, PROCESSES    sizes of study and census (default 5, 200, 5)
# LIMIT      seconds for the workflow (default 460); what is done by then is packed, and a second call on the same machine
#            goes on where the first was stopped
# FIRST_CONTACT=0 leaves out the recorded layer, which also compiles the kernels once for all processes
# OUT        gets first_contact-POINTS.json, identity-POINTS.json, evidence-POINTS.tar and logs-POINTS.tar.gz
set -euo pipefail

points=("${@:-published}")
[ $# -gt 0 ] || points=(published auto)
: "${OUT:?names the folder for the results}" "${ROUTEBLOCK_EXTENSION:?names the MoE extension}"
name=$(IFS=-; echo "${points[*]}")
python=$(command -v "${PYTHON:-python3}")
work=$(mktemp -d)
started=$SECONDS
say() { echo "$((SECONDS - started)) s: $*"; }

export PYTHONPATH="$PWD/workflow${SITE:+:$SITE}${PYTHONPATH:+:$PYTHONPATH}" PYTHONNOUSERSITE=1 PYTHONDONTWRITEBYTECODE=
export ROUTEBLOCK_EXTENSION CUDA_CACHE_PATH="${CUDA_CACHE_PATH:-/tmp/routeblock-cuda-cache}" CUDA_CACHE_MAXSIZE=4294967296 OMP_NUM_THREADS=2
unset ROUTEBLOCK_PROBE
mkdir -p "$work/bin" "$OUT"
printf '#!/bin/sh\nexec "%s" -m routeblock "$@"\n' "$python" > "$work/bin/routeblock"
chmod +x "$work/bin/routeblock"
PATH="$work/bin:$PATH"

finish() {
    status=$?
    tar -czf "$OUT/logs-$name.tar.gz" results/logs .snakemake/log 2> /dev/null || true
    rm -rf "$work"
    say "exit $status"
}
trap finish EXIT

if [ "${FIRST_CONTACT:-1}" = 1 ]; then
    "$python" tests/gpu/first_contact.py fixtures/golden "$OUT/first_contact-$name.json" layer > "$work/first_contact" 2>&1 ||
        { tail -n 30 "$work/first_contact"; say "first contact failed"; exit 1; }
    tail -n 1 "$work/first_contact"
    say "first contact"
fi

cat > "$work/study.yaml" <<YAML
lanes: [cuda]
points: [$(IFS=,; echo "${points[*]}")]
plan_source: [${SOURCES:-stored, captured}]
replicates: ${REPLICATES:-5}
cuda: {gpus: 1, wait_s: 180, python: ${CUDA_PYTHON:-null}, census: {calls: ${CALLS:-200}, processes: ${PROCESSES:-5}}}
YAML

# Whatever is done when the time is over is packed: a study that is not whole is refused by the scorer, not by this.
pack() { cp results/identity/cuda/identity.json "$OUT/identity-$name.json" && routeblock study-a pack-evidence --results results --out "$work/evidence" && tar -cf "$OUT/evidence-$name.tar" -C "$work" evidence; }
timeout --signal=TERM --kill-after=20 "${LIMIT:-460}" "$python" -m snakemake --cores "${CORES:-$(nproc)}" --resources "gpu_queue=${QUEUE:-10}" \
    --configfile "$work/study.yaml" --scheduler greedy --nolock --rerun-incomplete --keep-going --show-failed-logs -- gpu_evidence > "$work/snakemake" 2>&1 ||
    { grep -A 12 -m 3 "^Error in" "$work/snakemake"; tail -n 25 "$work/snakemake"; say "the workflow failed"; pack; exit 1; }
say "runs"
pack
say "packed $(stat -c %s "$OUT/evidence-$name.tar") bytes"
