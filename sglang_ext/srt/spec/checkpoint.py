"""Where a draft checkpoint lies on disk."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from sglang_ext.core.spec.draft_fields import DraftConfigError


@lru_cache(maxsize=8)
def local_folder(path: str) -> Path:
    """A local folder as it is; a hub name is downloaded (config and safetensors only)."""
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(snapshot_download(path, allow_patterns=["*.json", "*.safetensors"]))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise DraftConfigError(
            "--speculative-draft-model-path",
            expected="a local folder or a repository that can be downloaded",
            found=path,
            remedy=str(error),
        ) from error
