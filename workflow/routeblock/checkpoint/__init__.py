# SPDX-License-Identifier: Apache-2.0
"""Quantised checkpoints in Hugging Face form: what is in the folder, what the layers are, their packed experts."""
