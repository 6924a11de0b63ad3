# SPDX-License-Identifier: Apache-2.0
"""The report: one file that says what was asked, what came out, and on which bytes each number rests."""
