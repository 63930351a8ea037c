"""Search several indexes of one model that services on other machines hold, as if they were one.

Inside: `Shards`, `addresses_in`.

Scores are the model's own, so those of different indexes compare, and the best of all are the best of each one's best.
Each service answers as `itm-fast serve` does: `GET /info`, `GET /search` and `POST /search`.
"""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from itm_fast.files import regular
from itm_fast.files.messages import shortened, shown
from itm_fast.search.manifest import SIDES
from itm_fast.search.queries import check_characters
from itm_fast.search.results import Hit, Item, Results

__all__ = ["Shards", "addresses_in"]

_RESULTS = 10
_MOST_BYTES = 32 * 2**20
_STRANGE = "expected an answer of itm-fast serve, got something else"


class _NoRedirection(urllib.request.HTTPRedirectHandler):
    """A query goes to the machines that were named, and nowhere else."""

    def redirect_request(self, *_arguments: Any) -> None:
        return None


def addresses_in(text: str) -> list[str]:
    """Return the addresses in a text such as "http://a:8000,http://b:8000"; none if it is the path of an index."""
    parts = text.split(",")
    return parts if all(part.startswith(("http://", "https://")) for part in parts) else []


class Shards:
    """Services that hold parts of a collection.

    Args:
        addresses: such as "http://10.0.0.2:8000".
        timeout: seconds to wait for an answer.

    Raises:
        ValueError: an address is no address, a service does not answer, or two of them serve different models.
    """

    def __init__(self, addresses: Sequence[str], timeout: float = 30) -> None:
        self._addresses, self._timeout = [one.rstrip("/") for one in addresses], timeout
        if not self._addresses or len(set(self._addresses)) < len(self._addresses):
            raise ValueError(f"address: expected different addresses of services, got {shown(list(addresses))}")
        for one in self._addresses:
            parts = urllib.parse.urlsplit(one)
            if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
                raise ValueError(f"address: expected one such as http://10.0.0.2:8000, got {shown(one)}")
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirection)
        self._facts = self._read()

    def _read(self) -> list[dict[str, Any]]:
        """Ask each service what it holds; ValueError as in the class."""
        found = list(self._all([f"{one}/info" for one in self._addresses], [None] * len(self._addresses)))
        for address, facts in zip(self._addresses, found, strict=True):
            if not isinstance(facts.get("fingerprints"), list) or any(type(facts.get(one)) is not int for one in SIDES):
                raise ValueError(f"{address}/info: {_STRANGE}")
            if facts["fingerprints"] != found[0]["fingerprints"]:
                raise ValueError(f"{address}: serves another model than {self._addresses[0]}; scores do not compare")
        return found

    def size(self, side: str = "images") -> int:
        """Return the number of images or captions of all services at the last search."""
        return sum(int(facts[side]) for facts in self._facts)

    def search(
        self,
        text: str | None = None,
        k: int | None = None,
        *,
        picture: Path | None = None,
        of: str | None = None,
        candidates: int | None = None,
        exact: bool = False,
    ) -> Results:
        """Find the items with the best scores in all services; pass a text or the path of a picture.

        Of several services, `Hit.service` names the one that holds the item, because ids are unique only in one index.

        Args:
            text, k, of, candidates, exact: as in `Index.search`. Each service scores `candidates` items.
            picture: the file is sent.

        Raises:
            OSError: the picture cannot be read.
            ValueError: a service refuses the query or does not answer, or two of them serve different models. The
                message names it.
        """
        if (text is None) == (picture is None):
            raise ValueError("query: expected a text or a picture")
        if text is not None:
            check_characters(text)
        self._facts = self._read()  # Each service may have changed or replaced its index.
        of = of or ("captions" if picture is not None and self.size("captions") else "images")
        most = self.size(of)
        k = min(_RESULTS, most) if k is None else k
        if type(k) is not int or not 1 <= k <= most:
            raise ValueError(f"k: expected 1 to {most}, the number of {of}, got {k}")
        body = None if picture is None else regular.read_bytes(picture)
        asked, bodies, places = [], [], []
        for address, facts in zip(self._addresses, self._facts, strict=True):
            if facts[of]:
                given = {"q": text, "k": min(k, facts[of]), "of": of, "candidates": candidates, "exact": exact or None}
                query = urllib.parse.urlencode({name: value for name, value in given.items() if value is not None})
                asked.append(f"{address}/search?{query}")
                bodies.append(body)
                places.append(address if len(self._addresses) > 1 else "")
        hits, scored = [], 0
        unknown: tuple[str, ...] = ()
        for address, place, one in zip(asked, places, self._all(asked, bodies), strict=True):
            try:
                hits += [(float(hit["score"]), _item(hit), place) for hit in one["hits"]]
                scored += int(one["scored"])
                # All services have the same model.
                unknown = tuple(map(str, one.get("unknown", ())))
            except (KeyError, TypeError, ValueError):
                raise ValueError(f"{address.partition('?')[0]}: {_STRANGE}") from None
        best = sorted(hits, key=lambda hit: -hit[0])[:k]
        ranked = tuple(Hit(rank, *hit) for rank, hit in enumerate(best, 1))
        return Results(text if text is not None else str(picture), ranked, scored, unknown)

    def _all(self, asked: Sequence[str], bodies: Sequence[bytes | None]) -> Iterator[dict[str, Any]]:
        with ThreadPoolExecutor(max(len(asked), 1)) as pool:
            yield from pool.map(self._answer, asked, bodies)

    def _answer(self, address: str, body: bytes | None) -> dict[str, Any]:
        place = address.partition("?")[0]
        headers = {} if body is None else {"content-type": "application/octet-stream"}
        try:
            with self._opener.open(urllib.request.Request(address, body, headers), timeout=self._timeout) as answer:
                content = answer.read(_MOST_BYTES + 1)
        except urllib.error.HTTPError as error:
            raise ValueError(f"{place}: {_reason(error)}") from None
        except (OSError, http.client.HTTPException) as error:
            reason = shortened(str(getattr(error, "reason", error)))
            raise ValueError(f"{place}: does not answer ({reason}); start itm-fast serve there") from None
        try:
            found = json.loads(content)
            if not isinstance(found, dict) or len(content) > _MOST_BYTES:
                raise ValueError
        except ValueError:
            raise ValueError(f"{place}: {_STRANGE}") from None
        return found


def _reason(error: urllib.error.HTTPError) -> str:
    try:
        return shortened(str(json.loads(error.read(2**16))["error"]))
    except (ValueError, KeyError, TypeError):
        return f"HTTP {error.code}"


def _item(hit: dict[str, Any]) -> Item:
    image = hit.get("image") if hit["side"] == "captions" else None
    return Item(str(hit["id"]), str(hit["side"]), tuple(map(str, hit["captions"])), image=image or "")
