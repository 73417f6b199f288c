"""A copy of the artefact on the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError

from selector.schema import InputError


def check_token(repository: str) -> None:
    """InputError where there is no token to push with: said before any work is done."""
    if get_token() is None:
        raise InputError(f"export.push={repository}: no hub token here: run `hf auth login`, or set HF_TOKEN")


def push(folder: Path, repository: str) -> str:
    """Upload the directory as it stands; what was done, in words.

    Raises:
        InputError: the hub cannot be reached, or refuses. The directory on this machine is complete.
    """
    api = HfApi()
    try:
        api.create_repo(repository, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repository, folder_path=folder, commit_message="Selector", delete_patterns="*"
        )
    except (HfHubHTTPError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(f"{folder} is complete, but {repository} did not get its copy: {reason}") from error
    return f"{repository} on the hub holds a copy, commit {commit.oid[:12]}"
