# SPDX-License-Identifier: Apache-2.0
"""Study A: does the block a route lands in change the bits of a packed-AWQ MoE layer?"""
