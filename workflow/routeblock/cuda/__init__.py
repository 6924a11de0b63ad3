# SPDX-License-Identifier: Apache-2.0
"""How the kernels run on a GPU."""
