# SPDX-License-Identifier: Apache-2.0
"""The prediction of study A: frozen before any arithmetic, and held against random plans."""
