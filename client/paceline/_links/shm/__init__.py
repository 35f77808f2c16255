"""Frames through memory that two processes of one host share: the halves of a link, and their parts."""
