# SPDX-License-Identifier: Apache-2.0
"""How the kernels compute, bit for bit, on a CPU."""
