"""The table of mutants fits the code: `make mutants` itself takes minutes, and is run by hand."""

import mutants


def test_no_mutant_is_stale() -> None:
    assert mutants.stale() == []


def test_a_stale_mutant_is_reported_with_a_reason() -> None:
    gone = mutants.Mutant("a bug", "Makefile", "no such text", "", ("no_such_test.py",))
    text, test = mutants.stale([gone])
    assert text == "Makefile has this text 0 times, not once: 'no such text'"
    assert test == "there is no tests/no_such_test.py"
