# SPDX-License-Identifier: Apache-2.0
"""What the rules of the alignment's cost ask."""

from __future__ import annotations

# A test holds the list against the tables' own.
TABLES = ("alignment_cost", "alignment_checks", "alignment_mutations")
FIGURES = ("alignment_cost",)
RECORDED = "fixtures/recorded/alignment_cost/h200"
RESULTS = "results/alignment_cost/recorded-h200"
FILES = ("batches.parquet", "run.json", "exactness.json", "sanitizer.json")
