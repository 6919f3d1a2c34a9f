"""Checkpoints by their name on the Hugging Face Hub: from its cache, or over the network where there is one."""

from __future__ import annotations

import re
from pathlib import Path

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_PATTERNS = ["*.safetensors", "*.json", "*.txt", "*.jinja"]


def is_hub_name(name: str) -> bool:
    """Say whether `name` looks like ``organisation/model``."""
    return _NAME.fullmatch(name) is not None


def find_on_hub(name: str) -> Path:
    """Return the directory of a checkpoint on the Hub, downloaded if the cache lacks it.

    Only safetensors and the documents beside them are fetched.

    Raises:
        ValueError: it is neither cached nor to be had: no network, no such name, no permission.
    """
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=_PATTERNS))
    except Exception as error:  # its errors, those of its network library and of the cache have no common base
        reason = " ".join(str(error).split("\n")[0].split(". ")[0].split())
    try:
        return Path(snapshot_download(name, allow_patterns=_PATTERNS, local_files_only=True))
    except Exception:
        raise ValueError(
            f"{name}: there is no such directory here, it is not in the Hub's cache, and it could not be fetched "
            f"({reason}); give the path of a directory, or log in with huggingface-cli where it is gated"
        ) from None
