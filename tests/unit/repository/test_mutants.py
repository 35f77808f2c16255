"""The table of mutants fits the code: `make mutants` itself takes minutes, and is run by hand."""

import mutants


def test_each_text_that_a_mutant_replaces_is_there_once() -> None:
    assert mutants.stale() == []


def test_what_does_not_fit_is_told() -> None:
    gone = mutants.Mutant("a bug", "Makefile", "no such text", "", ("no_such_test.py",))
    text, test = mutants.stale([gone])
    assert text == "Makefile has this text 0 times, not once: 'no such text'"
    assert test == "there is no tests/no_such_test.py"
