"""Data: tokenizers, the token-file format, the loader, and one folder with a prepare.py for each data set."""
