# SPDX-License-Identifier: Apache-2.0
"""Runs of study A: one cell, one history, one replicate, one process each."""
