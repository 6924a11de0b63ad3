# SPDX-License-Identifier: Apache-2.0
"""Plug-ins for vLLM, off unless their variable is set: `register` is the entry point that vLLM's loader calls."""

from routeblock.vllm_plugin.alignment import register

__all__ = ["register"]
