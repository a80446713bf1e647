# SPDX-License-Identifier: Apache-2.0
"""What a pad row holds where a real one holds an index (law 2): each is a place that no kernel reads or writes."""

NULL_BLOCK = 0
PAD_SLOT = -1
PAD_STATE_SLOT = 0
PAD_EXPERT = -1
