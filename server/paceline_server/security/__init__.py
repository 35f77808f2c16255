"""Who may come in: TLS for the connection, tokens for the calls.

tokens.py        PURE: what the file of tokens says, and what a caller with this token may do
token_file.py    the file, read again when it has changed
tls.py           the coordinator's certificate, and whose certificates it asks for
exposure.py      PURE: what is to be said about an address that others can reach
authenticate.py  every call to every service, before its handler sees it
"""
