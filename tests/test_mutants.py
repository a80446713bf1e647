# SPDX-License-Identifier: Apache-2.0
"""The list of one-line faults fits the tree; ``python tests/mutants.py`` runs them (an hour, by hand)."""

from __future__ import annotations

import mutants


def test_every_fault_still_fits_the_code_and_names_tests() -> None:
    listed = list(mutants.load())
    assert len(listed) >= 60
    for mutant in listed:
        text = (mutants.ROOT / mutant.file).read_text()
        assert text.count(mutant.old) == 1, mutant
        assert mutant.new not in ("", mutant.old), mutant
        for test in mutant.tests:
            if test.startswith("tests/"):
                assert (mutants.ROOT / test.split("::")[0]).exists(), mutant
