"""A dataset to a hub: shards, manifest and a card, in one commit of a dataset repository."""

import json
from pathlib import Path
from typing import Any

import httpx
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from bulk.atomic import written
from bulk.errors import DatasetError, OutputError
from bulk.outputs import measured
from bulk.workplace import MANIFEST

CARD = "README.md"
PUSHED = ("data-*", MANIFEST, CARD)  # rejects are nobody's data
# RuntimeError: of an upload, with the reason behind it
_FAILURES = (
    HfHubHTTPError, HFValidationError, httpx.HTTPError, OSError, ValueError, RuntimeError
)  # fmt: skip


def push(folder: Path, repo_id: str, *, private: bool, partial: bool = False) -> str:
    """The commit's address. Shards of an earlier push that are no more are removed.

    The token and the hub are those of huggingface_hub (HF_TOKEN, HF_ENDPOINT). Raises OutputError
    for a folder that is not as its manifest says, and DatasetError where the hub says no.
    """
    manifest = _checked(folder, partial)
    card = folder / CARD
    if not card.exists():
        with written(card) as draft:
            draft.write_text(_card(manifest))
    title = f"{manifest['samples']['delivered']} samples, spec {manifest['spec_sha256'][:12]}"
    api = HfApi(library_name="tokenmill")
    try:
        api.create_repo(repo_id, repo_type="dataset", private=private, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repo_id, repo_type="dataset", folder_path=folder,
            allow_patterns=list(PUSHED), delete_patterns=["data-*"],
            commit_message=title,
        )  # fmt: skip
    except _FAILURES as error:
        words = f"{error} {error.__cause__ or ''}"
        reason = " ".join(words.split()) or type(error).__name__
        raise DatasetError(f"{repo_id} could not be pushed: {reason[:500]}") from None
    return str(commit.commit_url)


def _checked(folder: Path, partial: bool) -> dict[str, Any]:
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_bytes())
    except (OSError, ValueError):
        raise OutputError(f"{folder} has no manifest: the dataset is not made yet") from None
    if not manifest["complete"] and not partial:
        raise OutputError(f"{folder} is not complete; --partial pushes what is there")
    for shard in manifest["shards"]:
        path = folder / shard["name"]
        if not path.exists() or measured(path) != (shard["bytes"], shard["sha256"]):
            raise OutputError(f"{path} is not what the manifest says")
    return manifest


def _card(manifest: dict[str, Any]) -> str:
    spec, samples = manifest["spec"], manifest["samples"]
    return (
        "---\nconfigs:\n- config_name: default\n  data_files: data-*\ntags:\n- synthetic\n---\n\n"
        f"{samples['delivered']} samples of {manifest['rows']} rows, generated with "
        f"`{spec['model']}` by Tokenmill {manifest['versions']['tokenmill']}; "
        f"{samples['invalid'] + samples['failed']} were not delivered. "
        f"`{MANIFEST}` says how it was made, each row's "
        f"`{spec['output']['details']}` with which seed.\n"
    )
