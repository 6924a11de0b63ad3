# SPDX-License-Identifier: Apache-2.0
"""Walks the CUDA blocks of a launch one by one."""
