# SPDX-License-Identifier: Apache-2.0
"""Steps that are captured once and replayed."""
