# SPDX-License-Identifier: Apache-2.0
"""How a result is kept and checked."""
