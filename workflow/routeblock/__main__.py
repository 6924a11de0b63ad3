# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import sys

from routeblock.cli import main

sys.exit(main())
