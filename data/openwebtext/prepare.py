"""OpenWebText, the open copy of GPT-2's training text: 8 million documents, 9 billion tokens of GPT-2, 17 GB as prepared.

    python data/openwebtext/prepare.py [--files=1] [--tokenizer=gpt2] [--input=FOLDER] [--out=FOLDER]

Downloads the parquet files (24 GB) from the hub into its cache, or reads them from a folder. 0.05% of the documents are held out,
about as many as nanoGPT holds out, though not the same ones: they are chosen by the hash of their text.
"""

import sys
from pathlib import Path

if not __package__:  # run as a script: the repository's root is not on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from configurator import run
from data.hub import HubSet, prepare_hub_set

SOURCE = HubSet(
    name="openwebtext",
    repository="Skylion007/openwebtext",
    revision="main",  # the hub's own conversion (refs/convert/parquet) has only its first 5 GB
    prefix="plain_text/",
    licence="CC0 (the collection; the documents are their authors')",
    val_fraction=0.0005,
    val_inputs=None,
)


def main(argv: list[str]) -> None:
    prepare_hub_set(SOURCE, argv, Path(__file__).resolve().parent, __doc__.splitlines()[0])


if __name__ == "__main__":
    run(main)
