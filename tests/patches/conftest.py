# SPDX-License-Identifier: Apache-2.0
import sys
from pathlib import Path

# `patches` is the package at the root, not this folder.
sys.path.insert(0, str(Path(__file__).parents[2]))
