"""Loads the rules for every test, such as that it leaves no thread behind (`tests/support/every_test.py`)."""

pytest_plugins = ["support.every_test"]
