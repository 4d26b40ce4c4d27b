"""Tokens sent to the processes of their experts by MORI, AMD's library for the GPUs of one host."""

MODULES = ("dispatch",)
