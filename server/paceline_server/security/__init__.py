"""Decides which callers may connect: TLS for the connection, tokens for the calls (see `services.authenticate`).

tokens.py      PURE: reads the file of tokens, says what a caller may do, warns about an address that others can reach
token_file.py  the file of tokens, read again when it has changed
tls.py         the coordinator's certificate and the authority of its callers', read again when they have changed
"""
