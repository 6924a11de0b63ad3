# SPDX-License-Identifier: Apache-2.0
"""What only a GPU can say of study A: captures, census, agreement with the twin, versions, the probe."""
