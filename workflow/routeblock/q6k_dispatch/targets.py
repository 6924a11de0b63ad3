# SPDX-License-Identifier: Apache-2.0
"""What the rules of the fast paths ask."""

from __future__ import annotations

# A test holds the list against the tables' own.
TABLES = ("peers", "counters", "batch_bits", "dispatch_checks", "dispatch_mutations")
PROTOCOL = "fixtures/protocols/q6k_dispatch.json"
RECORDED = "fixtures/recorded/q6k_dispatch/h200"
RESULTS = "results/q6k_dispatch/recorded-h200"
FILES = ("batches.parquet", "run.json", "counters.json", "sanitizer.json")
