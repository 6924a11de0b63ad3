# SPDX-License-Identifier: Apache-2.0
"""Study B: do grouped schedules pay for Q6_K x Q8_1 expert mat-vec?"""
