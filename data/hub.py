"""Data sets of the Hugging Face hub that come as parquet files: what their prepare scripts share."""

from pathlib import Path
from typing import ClassVar, NamedTuple

from pydantic import Field

from configurator import ConfigError, Settings, load
from data.prepare import PrepareConfig, prepare_files


class HubSet(NamedTuple):
    """A data set on the hub: `prefix` begins the names of its parquet files in `revision`; the held-out documents are the share
    `val_fraction` of the first `val_inputs` files, whatever number of files is taken (none: of all)."""

    name: str
    repository: str
    revision: str
    prefix: str
    licence: str
    val_fraction: float
    val_inputs: int | None


class HubConfig(Settings):
    """preparing a data set of the hub"""

    files: int | None = Field(None, ge=1, description="only the first so many files; none: all")
    input: str | None = Field(None, min_length=1, description="files fetched before (a folder or pattern); none: download them")
    tokenizer: str = Field("gpt2", min_length=1, description="gpt2, cl100k, o200k, bytes, bpe, or a tokenizer.json")
    out: str | None = Field(None, min_length=1, description="folder to write; none: that of the script")
    processes: int | None = Field(None, ge=1, description="processes; none: one a core")
    overwrite: bool = Field(False, description="replace what the folder holds")

    _needs: ClassVar[dict[str, tuple[str, object]]] = {"files": ("input", None)}


def fetch(source: HubSet, files: int | None) -> list[str]:
    """Local paths of the first `files` parquet files, in the hub's cache; what is there already is not fetched again."""
    try:
        from huggingface_hub import HfApi, hf_hub_download  # comes with lm-eval; needed here alone

        about = {"repo_type": "dataset", "revision": source.revision}
        listed = sorted(name for name in HfApi().list_repo_files(source.repository, **about) if _is_part(name, source.prefix))
        if not listed:
            raise LookupError(f"no parquet file that begins with {source.prefix!r}")
        return [hf_hub_download(source.repository, name, **about) for name in listed[:files]]
    except Exception as error:  # of the hub, of HTTP, of sockets: they share no base class
        reason = (str(error) or type(error).__name__).splitlines()[0]
        address = f"huggingface.co/datasets/{source.repository} (revision {source.revision}, {source.prefix}*.parquet)"
        hint = "run the command again where the hub is reachable, or fetch the files elsewhere and give --input=FOLDER"
        raise ConfigError(f"cannot download {address}: {reason}; {hint}") from None


def _is_part(name: str, prefix: str) -> bool:
    return name.startswith(prefix) and name.endswith(".parquet")


def prepare_hub_set(source: HubSet, argv: list[str], folder: Path, description: str) -> dict:
    """What the script of a hub's data set does; returns the meta."""
    config = load(HubConfig, argv, prog=f"python data/{source.name}/prepare.py", description=description).config
    inputs = config.input.split(",") if config.input else fetch(source, config.files)
    settings = PrepareConfig(
        input=",".join(inputs),
        out=config.out or str(folder),
        tokenizer=config.tokenizer,
        val_fraction=source.val_fraction,
        val_inputs=source.val_inputs,
        source=f"huggingface.co/datasets/{source.repository}",
        licence=source.licence,
        processes=config.processes,
        overwrite=config.overwrite,
    )
    return prepare_files(settings, inputs, source.name)
