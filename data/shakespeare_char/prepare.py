"""Tiny Shakespeare by characters, as in nanoGPT: 1.1 MB, the first 90 % to train, the last 10 % held out.

    python data/shakespeare_char/prepare.py [--input=FILE] [--out=FOLDER]

Downloads the text, or reads it from a file. Another text than Tiny Shakespeare may be given; meta.json then says so.
Each split is one document. The ids of the 65 characters are nanoGPT's; the separator is id 65.
"""

import hashlib
import http.client
import os
import sys
import urllib.request
from pathlib import Path

if not __package__:  # run as a script: the repository's root is not on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pydantic import Field

from configurator import ConfigError, Settings, load, run
from data.prepare import write_dataset
from data.tokenizer import Tokenizer

FOLDER = Path(__file__).resolve().parent
ADDRESS = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"


class PrepareConfig(Settings):
    input: str | None = Field(None, description="text file to read (none: download Tiny Shakespeare)")
    out: str | None = Field(None, description="folder to write (none: data/shakespeare_char)")


def download() -> bytes:
    """Tiny Shakespeare; raises ConfigError if it cannot be had or is not the text it should be."""
    try:
        with urllib.request.urlopen(ADDRESS, timeout=30) as response:
            content = response.read()
    except (OSError, http.client.HTTPException) as error:
        raise ConfigError(f"cannot download {ADDRESS} ({error}): fetch it elsewhere and give --input=FILE") from None
    found = hashlib.sha256(content).hexdigest()
    if found != SHA256:
        raise ConfigError(f"{ADDRESS} has sha256 {found}, expected {SHA256}: give the text by --input=FILE")
    return content


def read_input(path: str | os.PathLike) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read --input={path}: {error.strerror}") from None


def prepare(out: str | os.PathLike = FOLDER, *, input: str | os.PathLike | None = None) -> dict:
    """Write the data set into `out` and return its meta. Raises ConfigError for text that is no UTF-8 or too short."""
    content = download() if input is None else read_input(input)
    found = hashlib.sha256(content).hexdigest()
    reference = found == SHA256
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"--input={input} is not UTF-8 text: {error.reason} at byte {error.start}") from None
    cut = int(len(text) * 0.9)
    tokenizer = Tokenizer.from_characters(text)
    print(f"tokenizer: {tokenizer.vocab_size - 1} characters and the separator", flush=True)
    return write_dataset(
        out,
        tokenizer,
        [text[:cut]],
        [text[cut:]],
        name="shakespeare_char",
        source=ADDRESS if reference else f"{Path(input).name}, sha256 {found}: not Tiny Shakespeare",
        licence="public domain" if reference else "that of the given file",
    )


def main(argv: list[str]) -> None:
    resolved = load(PrepareConfig, argv, prog="python data/shakespeare_char/prepare.py", description=__doc__.splitlines()[0])
    prepare(resolved.config.out or FOLDER, input=resolved.config.input)


if __name__ == "__main__":
    run(main)
