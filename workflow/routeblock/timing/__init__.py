# SPDX-License-Identifier: Apache-2.0
"""One machine for timed experiments; docs/timing.md says how to add one."""
