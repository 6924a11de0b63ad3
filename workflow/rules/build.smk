# SPDX-License-Identifier: Apache-2.0
# Study B's CUDA kernels as cubins; needs NVRTC (envs/cuda13.txt, envs/cuda12.txt for sm_70), no GPU.


rule build_kernels:
    output:
        cubin="results/build/{arch}/q6k_schedules.cubin",
        record="results/build/{arch}/build.json",
        manifest="results/build/{arch}/build.manifest.json",
    log:
        "results/logs/build/{arch}.log",
    resources:
        **LONG,
    params:
        out=subpath(output.record, parent=True),
        code=code("routeblock.cuda.build"),
    shell:
        "routeblock gpu build-kernels --arch {wildcards.arch} --out {params.out:q} 2> {log:q}"
