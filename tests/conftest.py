# SPDX-License-Identifier: Apache-2.0
"""Before numba is imported anywhere: a pool large enough for every thread count of the study."""

import os

os.environ.setdefault("NUMBA_NUM_THREADS", "4")
