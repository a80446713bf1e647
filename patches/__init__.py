# SPDX-License-Identifier: Apache-2.0
"""Fixes for upstream vLLM, one file a fix, and the tool that applies them: ``python -m patches``."""
