"""FineWeb-Edu, its sample of 10 billion tokens: web pages that were judged to be educational, 14 parquet files of 2 GB.

    python data/fineweb_edu/prepare.py [--files=2] [--tokenizer=gpt2] [--input=FOLDER] [--out=FOLDER]

Downloads the files from the hub into its cache, or reads them from a folder. Half a percent of the documents of the first file are
held out, so that the held-out split is the same for any number of files; documents of the others with such a hash are left out.
"""

import sys
from pathlib import Path

if not __package__:  # run as a script: the repository's root is not on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from configurator import run
from data.hub import HubSet, prepare_hub_set

SOURCE = HubSet(
    name="fineweb_edu",
    repository="HuggingFaceFW/fineweb-edu",
    revision="main",
    prefix="sample/10BT/",
    licence="ODC-By 1.0",
    val_fraction=0.005,
    val_inputs=1,
)


def main(argv: list[str]) -> None:
    prepare_hub_set(SOURCE, argv, Path(__file__).resolve().parent, __doc__.splitlines()[0])


if __name__ == "__main__":
    run(main)
