# SPDX-License-Identifier: Apache-2.0
"""The scorer of study A. It imports `routeblock.evidence` and `routeblock.errors`, and nothing else of the package."""
