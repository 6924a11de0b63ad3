# SPDX-License-Identifier: Apache-2.0
"""vLLM itself, serving: do completions repeat, what does canonical order change, and what does a step cost?"""
