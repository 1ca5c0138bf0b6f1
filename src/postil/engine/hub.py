"""From what a user calls a model to where it lies: the embedded default, local files, hub ids."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from postil.engine import embedded, gguf
from postil.engine.cache import NO_SPACE
from postil.errors import ModelNotFound

# huggingface_hub is imported where it is used: most runs need nothing of it.

DEFAULT_MODEL = embedded.DEFAULT_MODEL

# What transformers reads of a repository: no duplicates in other formats or for other programs.
HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken"]
HUB_FILES_IGNORED = ["*/*", "consolidated*"]

_OTHERWISE = "give the path of a model folder or .gguf file, or no model for the embedded default"


@dataclass(frozen=True)
class ModelSource:
    """Where a model's files are, in the words of transformers' `from_pretrained`.

    Attributes:
        name: for display; as the user gave it.
        path_or_id: a local folder, or a hub id.
        gguf_file: the file inside that folder, if the weights are a GGUF.
    """

    name: str
    path_or_id: str
    gguf_file: str | None = None


@dataclass(frozen=True)
class CachedModel:
    """A model that needs no network, or the embedded default before its first use.

    Attributes:
        name: the default's name or the hub id.
        path: of the file or folder; a model can be loaded by it.
        bytes: on disk, or still to be fetched.
        kind: `embedded`, `hub`, or `gguf` for a GGUF in the hub's cache (load it by its path).
        fetched: whether it is there.
    """

    name: str
    path: Path
    bytes: int
    kind: str
    fetched: bool = True


def resolve(name: str | None = None, *, progress: bool = True) -> ModelSource:
    """Find a model. Only the embedded default is fetched here, on its first use; a hub id is not.

    Args:
        name: `None` or the default's name, the path of a `.gguf` file or of a folder with a
            `config.json`, or a hub id `owner/name`. What exists on disk comes first.
        progress: show a progress bar on stderr while the default is fetched.

    Raises:
        ModelNotFound: nothing of that name can be loaded, or the default cannot be fetched.
    """
    exists = name is not None and os.path.exists(name)
    if name is None or (name.casefold() == DEFAULT_MODEL.casefold() and not exists):
        file = embedded.fetch(progress)
        return ModelSource(DEFAULT_MODEL, str(file.parent), file.name)
    path = os.path.abspath(os.path.expanduser(name))
    if name and os.path.isfile(path):
        gguf.check(name, path)
        return ModelSource(name, os.path.dirname(path), os.path.basename(path))
    if name and os.path.isdir(path):
        if not os.path.isfile(os.path.join(path, "config.json")):
            raise ModelNotFound(
                f"the folder {name} has no config.json, so it is not a model of transformers: "
                "give the folder that holds one, or the path of a .gguf file"
            )
        return ModelSource(name, path)
    if not _is_hub_id(name):
        raise ModelNotFound(f"no file, folder or hub id of that name ({name!r}): {_OTHERWISE}")

    import huggingface_hub

    cached = isinstance(huggingface_hub.try_to_load_from_cache(name, "config.json"), str)
    if huggingface_hub.is_offline_mode() and not cached:
        raise _not_cached(name)
    return ModelSource(name, name)


def pull(name: str | None = None, progress: bool = True) -> ModelSource:
    """Find a model and fetch what of it is not here yet. The result needs no network.

    Without a network, what the hub's cache has of a hub id is all there is.

    Args:
        name: as in `resolve`.
        progress: show progress bars on stderr.

    Raises:
        ModelNotFound: there is no such model, or it cannot be fetched.
    """
    source = resolve(name, progress=progress)
    if os.path.isabs(source.path_or_id):
        return source

    import huggingface_hub

    try:
        with nullcontext() if progress else _without_hub_bars():
            folder = huggingface_hub.snapshot_download(
                source.path_or_id, allow_patterns=HUB_FILES, ignore_patterns=HUB_FILES_IGNORED
            )
    # The hub's HTTP client, and with it the errors of a broken connection, differs by release.
    except Exception as error:
        raise explain_hub_error(source.name, error) from error
    if not any(Path(folder).glob("*.safetensors")):
        raise ModelNotFound(
            f"the hub's {source.name} has no weights in the safetensors format, or they were never "
            f"fetched: run `postil models pull {source.name}` with a network, or choose another "
            "repository of that model"
        )
    return ModelSource(source.name, folder)


def cached_models() -> list[CachedModel]:
    """The embedded default, fetched or not, then the models in the hub's cache by name."""
    import huggingface_hub
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.errors import CacheNotFound

    file, size = embedded.path(), embedded.EMBEDDED.bytes
    fetched = file.is_file() and file.stat().st_size == size
    default = CachedModel(DEFAULT_MODEL, file, size, "embedded", fetched)
    try:
        repositories = huggingface_hub.scan_cache_dir(HF_HUB_CACHE).repos
    except (CacheNotFound, ValueError):  # no folder, or a file in its place
        repositories = frozenset()
    models = []
    for repository in repositories:
        if repository.repo_type != "model" or not repository.revisions:
            continue
        newest = max(repository.revisions, key=lambda revision: revision.last_modified)
        if any(part.file_name == "config.json" for part in newest.files):
            size = newest.size_on_disk
            models.append(CachedModel(repository.repo_id, newest.snapshot_path, size, "hub"))
        models += [
            CachedModel(repository.repo_id, part.file_path, part.size_on_disk, "gguf")
            for part in newest.files
            if part.file_name.endswith(".gguf")
        ]
    return [default, *sorted(models, key=lambda model: (model.name, model.path))]


def explain_hub_error(name: str, error: BaseException) -> ModelNotFound:
    """One sentence for what went wrong while `name` was fetched or loaded; raise it from `error`.

    Args:
        name: as the user gave it.
        error: what huggingface_hub or transformers raised. The errors it was raised from are
            looked at too, since transformers wraps what happened into an `OSError` with a page
            of advice.
    """
    import socket
    import ssl

    from huggingface_hub import constants, errors, is_offline_mode

    chain = list(_causes(error))

    def is_any(*kinds: type[BaseException]) -> bool:
        return any(isinstance(link, kinds) for link in chain)

    if is_any(errors.OfflineModeIsEnabled) or (
        is_offline_mode() and is_any(errors.LocalEntryNotFoundError)
    ):
        return _not_cached(name)
    if is_any(errors.GatedRepoError):
        reason = (
            f"the hub's {name} is gated: accept its terms on its page and log in with "
            "`hf auth login`, or choose another model"
        )
    elif is_any(errors.RepositoryNotFoundError):
        reason = (
            f"the hub has no model {name} that you may read: check the spelling, log in with "
            f"`hf auth login` if it is private, or {_OTHERWISE}"
        )
    elif any(isinstance(link, OSError) and link.errno in NO_SPACE for link in chain):
        reason = (
            f"no space is left for {name} in the hub's cache ({constants.HF_HUB_CACHE}): free "
            "some, or set HF_HOME to a folder on a larger disk"
        )
    # What the hub answered stands behind an error that says no more than that nothing is cached.
    elif is_any(errors.HfHubHTTPError) and not is_any(errors.RemoteEntryNotFoundError):
        reason = f"the hub did not give {name} ({_first_line(chain[-1])}): try again later"
    elif is_any(
        errors.LocalEntryNotFoundError, ConnectionError, TimeoutError, socket.gaierror, ssl.SSLError
    ):
        reason = (
            f"{name} is no local file or folder, and the hub cannot be reached to fetch it: check "
            f"the network, or {_OTHERWISE}"
        )
    else:
        reason = (
            f"{name} cannot be loaded ({_first_line(error)}): check its files, or choose another "
            "model"
        )
    return ModelNotFound(reason)


def _is_hub_id(name: str) -> bool:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    with suppress(HFValidationError):
        validate_repo_id(name)
        # What ends in .gguf is a path with a misspelling.
        return name.count("/") == 1 and not name.endswith(".gguf")
    return False


def _not_cached(name: str) -> ModelNotFound:
    return ModelNotFound(
        f"{name} is no local file or folder and is not, or not whole, in the hub's cache, and "
        f"HF_HUB_OFFLINE is set: unset it and run `postil models pull {name}`, or choose a model "
        "that `postil models list` shows"
    )


@contextmanager
def _without_hub_bars() -> Iterator[None]:
    from huggingface_hub import utils

    shown = not utils.are_progress_bars_disabled()
    if shown:
        utils.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            utils.enable_progress_bars()


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}".rstrip(": ")
