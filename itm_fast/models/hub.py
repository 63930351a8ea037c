"""Models on the Hugging Face Hub, through the mixin of the package huggingface_hub.

Inside: `HubModel`.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import attrs

from itm_fast.files import atomic
from itm_fast.files.messages import shown
from itm_fast.files.run_files import VOCABULARY
from itm_fast.models.model_card import CARD_FILE, Described, card_data, card_text

__all__ = ["HubModel"]

Self = TypeVar("Self", bound="HubModel")
# What a saved model consists of; a repository may hold more.
_FILES = ("config.json", "model.safetensors", VOCABULARY)
Results = str | os.PathLike[str] | Mapping[str, Any]


class HubModel:
    """Adds `save_pretrained`, `from_pretrained` and `push_to_hub` to a model that has `save` and `from_folder`.

    The package huggingface_hub is imported when one of them needs it. Nothing is sent without `push_to_hub`.
    """

    @classmethod
    def from_folder(cls, directory: str | os.PathLike[str], device: Any = "cpu") -> Any:
        """Load what `save` wrote."""
        raise NotImplementedError

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        *,
        run: str | os.PathLike[str] | None = None,
        results: Results | None = None,
        repo_id: str | None = None,
        push_to_hub: bool = False,
        **options: Any,
    ) -> str | None:
        """Write the model as `save` does, and a model card `README.md`, unless the folder has one.

        Args:
            save_directory: the folder. It is created if it is missing.
            run: the run directory of the model. The card then has its settings, validation and data fingerprints.
            results: measures for the card: the file that `itm-fast score --json` or `itm-fast evaluate --json` wrote,
                or its content.
            repo_id: name of the repository, as `user/name`; by default the name of the folder.
            push_to_hub: also upload to the Hub, with the `options` of `push_to_hub`. If the folder has a card already,
                it is uploaded, too.

        Returns:
            The address of the commit on the Hub, or None.

        Raises:
            TypeError: there are `options`, but nothing is uploaded.
            ValueError: the package huggingface_hub is not installed, or a file of the run or of the results is damaged.
        """
        if options and not push_to_hub:
            raise TypeError(f"{next(iter(options))}: expected only with push_to_hub=True")
        folder, bridge = Path(save_directory), _bridge()()
        bridge.describe(self, run, results, repo_id)
        has_card = (folder / CARD_FILE).exists()
        # The mixin would first delete the config.json of a model that is replaced.
        bridge._save_pretrained(folder)
        if not push_to_hub:
            return None
        card = (folder / CARD_FILE).read_text(encoding="utf-8") if has_card else None
        return bridge.upload(repo_id or folder.name, card=card, **options)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        run: str | os.PathLike[str] | None = None,
        results: Results | None = None,
        replace_card: bool = False,
        **options: Any,
    ) -> str:
        """Upload the files of `save_pretrained` to a repository of the Hub in one commit.

        A repository keeps its card, which someone may have edited, unless `replace_card` is true.

        Args:
            repo_id: name of the repository, as `user/name`. It is created if it is missing.
            run: as in `save_pretrained`.
            results: as in `save_pretrained`.
            replace_card: replace the card of the repository.
            options: those of `huggingface_hub.ModelHubMixin.push_to_hub`, such as `private`, `token`, `branch` and
                `commit_message`.

        Returns:
            The address of the commit.

        Raises:
            ValueError: as in `save_pretrained`.
        """
        bridge = _bridge()()
        bridge.describe(self, run, results, repo_id)
        return bridge.upload(repo_id, replace_card=replace_card, **options)

    @classmethod
    def from_pretrained(
        cls: type[Self], name_or_path: str | os.PathLike[str], *, device: Any = "cpu", **options: Any
    ) -> Self:
        """Load a model from a local folder, or from a repository of the Hub.

        A local folder needs neither a network nor the package huggingface_hub. A repository is downloaded into the
        cache of that package. The model is in evaluation mode.

        Args:
            name_or_path: a folder that `save_pretrained`, `save` or a training run wrote, or a name as `user/name`.
            device: device of the weights.
            options: for a repository, those of `huggingface_hub.ModelHubMixin.from_pretrained`: `revision`, `token`,
                `cache_dir`, `force_download`, `local_files_only`.

        Raises:
            ValueError: the folder is not a readable model, the model is of another class, or the package
                huggingface_hub is not installed.
        """
        folder = Path(name_or_path)
        if not folder.is_dir():
            folder = _bridge().from_pretrained(str(name_or_path), **options).folder
        model = cls.from_folder(folder, device)
        if not isinstance(model, cls):
            raise ValueError(
                f"{name_or_path}: expected a model {getattr(cls, 'name', cls.__name__)}, found {shown(model.name)}; "
                "MatchingModel.from_pretrained loads models of any class"
            )
        return model


@functools.cache
def _bridge() -> Any:
    """Return the class through which the mixin saves, loads and uploads models."""
    try:
        import huggingface_hub
        from huggingface_hub import ModelCard, ModelHubMixin, snapshot_download
    except ImportError:
        raise ValueError(
            "huggingface_hub: the package is not installed; install it with pip install 'itm_fast[hub]', or use "
            "model.save and itm_fast.models.load"
        ) from None

    class Bridge(ModelHubMixin, library_name="itm_fast"):
        """One model on its way to or from the Hub. Models themselves do not inherit from the mixin.

        Its constructor would read their arguments, and its import would slow down every import of the package.
        """

        # Without this, the mixin would take the entries of config.json for arguments.
        def __init__(self) -> None:
            self.model: Any = None
            self.described: Described | None = None
            self.card: Callable[[str], str] | None = None  # Returns the card of a repository by its name.
            self.folder = Path()

        def describe(self, model: Any, run: Any, results: Any, repo_id: str | None) -> None:
            """Read what the card says, before anything is written."""
            self.model, self.described = model, Described.of(model, run, results, repo_id)

        def upload(self, repo_id: str, *, card: str | None = None, replace_card: bool = False, **options: Any) -> str:
            """Upload the model with this card, or else with that of the repository, or else with a new one."""
            token, branch = options.get("token"), options.get("branch")

            def card_of(resolved: str) -> str:
                if card is not None:
                    return card
                api = huggingface_hub.HfApi(token=token)
                if not replace_card and api.file_exists(resolved, CARD_FILE, revision=branch):
                    kept = api.hf_hub_download(resolved, CARD_FILE, revision=branch)
                    return Path(kept).read_text(encoding="utf-8")
                return str(self.generate_model_card(title=resolved))

            self.card = card_of
            address: str = self.push_to_hub(repo_id, **options)
            return address

        def generate_model_card(self, *_: Any, title: str | None = None, **__: Any) -> Any:
            assert self.described is not None
            described = self.described if title is None else attrs.evolve(self.described, title=title)
            return ModelCard(f"---\n{card_data(described)}\n---\n\n{card_text(described)}")

        def _save_pretrained(self, save_directory: Path) -> None:
            card = save_directory / CARD_FILE
            if self.card is not None:
                # The mixin uploads a folder below a temporary one, named as the repository: user/name.
                atomic.write_text(card, self.card("/".join(save_directory.parts[-2:])))
            elif not card.exists():
                atomic.write_text(card, str(self.generate_model_card()))
            self.model.save(save_directory)

        @classmethod
        def _from_pretrained(cls, *, model_id: str, **options: Any) -> Any:
            bridge = cls()
            bridge.folder = Path(snapshot_download(repo_id=model_id, allow_patterns=list(_FILES), **options))
            return bridge

    return Bridge
