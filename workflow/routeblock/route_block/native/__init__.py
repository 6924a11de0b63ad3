# SPDX-License-Identifier: Apache-2.0
"""vLLM's own alignment as it is: does history shift its plans, and when does it repeat itself?"""
