"""Elastic training: how samples are shared out."""
