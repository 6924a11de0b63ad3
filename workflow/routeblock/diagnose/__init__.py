# SPDX-License-Identifier: Apache-2.0
"""Questions about a model of one's own: which bits can change, between which runs, why, and what stops it."""
