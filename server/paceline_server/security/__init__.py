"""Who may come in: TLS for the connection, tokens for the calls (`services.authenticate` asks for them).

tokens.py             PURE: what the file of tokens says, and what a caller with this token may do
token_file.py         the file, read again when it has changed
tls.py                the coordinator's certificate, and whose certificates it asks for
certificate_files.py  the certificate's files, read again when they have changed
exposure.py           PURE: the warning about an address that others can reach
payer.py              PURE: who pays for a call
"""
