# SPDX-License-Identifier: Apache-2.0
"""Beyond study B: two fast paths for Q6_K x Q8_1 expert jobs with the same bits, their peers, and counters."""
