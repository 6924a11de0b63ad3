# SPDX-License-Identifier: Apache-2.0
"""The figures of study A."""
