#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Debian's Slurm and munge, where they are missing: by apt-get, with sudo when not root. Nothing of them is started.
set -euo pipefail

export PATH="$PATH:/usr/sbin:/sbin"
missing=()
for tool in munged slurmctld slurmd sbatch; do
    command -v "$tool" > /dev/null || missing+=("$tool")
done
[ ${#missing[@]} -eq 0 ] && exit 0

fail() {
    echo "Slurm's ${missing[*]} missing, and $1: install slurm-wlm slurmctld slurmd slurm-client munge" >&2
    exit 2
}
command -v apt-get > /dev/null || fail "there is no apt-get"
as_root=()
if [ "$(id -u)" -ne 0 ]; then
    sudo -n true 2> /dev/null || fail "neither root nor sudo without a password"
    as_root=(sudo)
fi
# Debian starts what it installs; this says no to that, for this call alone.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' | "${as_root[@]}" tee "$policy" > /dev/null
    "${as_root[@]}" chmod 755 "$policy"
    trap '"${as_root[@]}" rm -f "$policy"' EXIT
fi
install=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive timeout -k 10 300 apt-get -qq)
{ "${install[@]}" update && "${install[@]}" install --no-install-recommends -y slurm-wlm slurmctld slurmd slurm-client munge; } \
    > /dev/null || fail "apt-get failed"
