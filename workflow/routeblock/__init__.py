# SPDX-License-Identifier: Apache-2.0
"""Bit-level evidence about Mixture-of-Experts kernels."""

__version__ = "0.1.0"
