# SPDX-License-Identifier: Apache-2.0
"""What the objects are: routing, work partition, launches, packed formats."""
