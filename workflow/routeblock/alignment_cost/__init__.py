# SPDX-License-Identifier: Apache-2.0
"""What canonical alignment costs beside vLLM's own: a protocol fixed before measuring, and its validator."""
