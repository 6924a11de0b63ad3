# SPDX-License-Identifier: Apache-2.0
# For `snakemake` in the checkout. The workflow is workflow/Snakefile, where deployments and the catalogue look for it.
include: "workflow/Snakefile"


# The default target of an included file does not count.
rule study:
    default_target: True
    input:
        rules.all.input,
