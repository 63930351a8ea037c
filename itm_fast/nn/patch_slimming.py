"""`PatchSlimming`: choose and aggregate the patches of a picture for each caption, and align them with its words."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from itm_fast.fragments import Fragments
from itm_fast.nn.normalization import l2norm
from itm_fast.nn.padded_pairs import at_least_a_row
from itm_fast.reference import validation

__all__ = ["PatchSlimming"]


class PatchSlimming(nn.Module):
    """Score pictures and captions after linguistic-aware patch slimming, for use in `gradient_sparse_scores`.

    For each pair:

    1. The significance of a patch is its cosine with the mean patch, plus its cosine with the mean word.
    2. The most significant share `keep_ratio` of the patches is kept. Learned weights aggregate them into fewer tokens.
    3. The other patches become one token. Their weights are the softmax of their significance.
    4. The score is the mean over the words of the best token, plus the mean over the tokens of the best word. Cosines
       below zero are multiplied by 0.1.

    No gradient flows through the significance. A class token, if there is one, joins the tokens as it is.

    Args:
        dim: width d of patches and words.
        n_regions: regions of each picture, with the class token.
        keep_ratio: share of the patches that is kept, above 0 and at most 1. The number is rounded up.
        aggregation_ratio: tokens after the aggregation, as a share of the kept patches. The number is rounded down, to
            at least one.
        class_token: the first region is a class token.

    Attributes:
        n_kept: number of kept patches. n_aggregated: number of tokens that they become.

    Raises:
        ValueError: a ratio is out of bounds, or a size is below 1.

    Source: Fu et al., Linguistic-Aware Patch Slimming Framework for Fine-grained Cross-Modal Alignment, CVPR 2024, in
    the form of the authors' code. It leaves out the network that predicts a score of each patch, and its
    Gumbel-softmax.
    """

    def __init__(
        self,
        dim: int,
        n_regions: int,
        *,
        keep_ratio: float = 0.5,
        aggregation_ratio: float = 0.4,
        class_token: bool = False,
    ) -> None:
        super().__init__()
        validation.check_sizes(dim=dim)
        validation.check_count("n_regions", n_regions, minimum=1 + class_token)
        for name, ratio in (("keep_ratio", keep_ratio), ("aggregation_ratio", aggregation_ratio)):
            if not 0 < ratio <= 1:
                raise ValueError(f"{name}: expected a number above 0 and at most 1, got {ratio}")
        self.n_regions, self.class_token = n_regions, class_token
        n_patches = n_regions - class_token
        self.n_kept = math.ceil(n_patches * keep_ratio)
        self.n_aggregated = max(int(n_patches * aggregation_ratio * keep_ratio), 1)
        hidden = max(dim // 5, 1)
        self.weigh = nn.Sequential(
            nn.LayerNorm(dim), nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, self.n_aggregated)
        )
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, images: Fragments, captions: Fragments) -> Tensor:
        """Score regions and words: (n_images, n_captions) float32 (float64 for float64), images are rows.

        Args:
            images: n sets of `n_regions` rows (d).
            captions: sets of rows (d). A caption without words scores 0.

        Raises:
            ValueError: a picture has another number of regions.
        """
        validation.check_fragments("images", images)
        validation.check_fragments("captions", captions)
        regions = self._regions(images)
        patches = regions[:, int(self.class_token) :]  # (n, k, d)
        words, lengths = at_least_a_row(captions)  # (m, w, d), (m,)
        inside = torch.arange(words.shape[1], device=words.device) < lengths[:, None]
        cosines = self._cosines(regions, words, self._weights(patches, self._significance(patches, words, lengths)))
        of_words = (cosines.max(dim=2).values * inside).sum(2) / lengths.clamp(min=1)
        best = cosines.masked_fill(~inside[None, :, None], -torch.inf).max(dim=3).values
        return of_words + best.masked_fill(lengths[None, :, None] == 0, 0.0).mean(2)

    @torch.no_grad()
    def weights(self, words: Tensor, regions: Tensor) -> Tensor:
        """Return the weights of the regions (k, d) in the token that each of the words (w, d) is most similar to.

        Returns:
            (w, k). Rows sum to one. If all patches are kept, a word may be most similar to the empty token of the other
            patches; its row is zero.
        """
        patches = regions[None, int(self.class_token) :]
        lengths = torch.tensor([len(words)], device=words.device)
        shares = self._weights(patches, self._significance(patches, words[None], lengths))  # (1, 1, t, k)
        best = self._cosines(regions[None], words[None], shares)[0, 0].argmax(0)
        rows = shares[0, 0]
        if self.class_token:
            of_class = torch.zeros(1, len(regions), dtype=rows.dtype, device=rows.device)
            of_class[0, 0] = 1
            rows = torch.cat([of_class, nn.functional.pad(rows, (1, 0))])
        return rows[best]

    def _cosines(self, regions: Tensor, words: Tensor, weights: Tensor) -> Tensor:
        """Return the cosines of tokens and words, (n, m, t, w) in at least float32, below zero multiplied by 0.1."""
        tokens = weights @ regions[:, None, int(self.class_token) :]  # (n, m, t, d)
        if self.class_token:
            first = regions[:, None, :1].expand(-1, tokens.shape[1], -1, -1)
            tokens = torch.cat([first, tokens], dim=2)
        # Cosines in 16 bits would tie: the scores of a gallery lie close together.
        with torch.autocast(words.device.type, enabled=False):
            return nn.functional.leaky_relu(l2norm(_wide(tokens)) @ l2norm(_wide(words)).transpose(1, 2), 0.1)

    def _regions(self, images: Fragments) -> Tensor:
        rows = len(images.values)
        if rows != len(images) * self.n_regions or images.max_length > self.n_regions:
            raise ValueError(
                f"images: expected {self.n_regions} regions in each, got {rows} in {len(images)} images, at most "
                f"{images.max_length} in one"
            )
        return images.values.view(len(images), self.n_regions, images.values.shape[1])

    @torch.no_grad()
    def _significance(self, patches: Tensor, words: Tensor, lengths: Tensor) -> Tensor:
        """Return the significance of each patch for each caption, (n, m, k) in at least float32."""
        with torch.autocast(words.device.type, enabled=False):
            patches, words = _wide(patches), _wide(words)
            units = l2norm(patches)
            own = units @ l2norm(patches.mean(1))[:, :, None]  # (n, k, 1)
            mean_words = l2norm(words.sum(1) / lengths.clamp(min=1)[:, None])  # padding is zero
            return (own + units @ mean_words.t()).transpose(1, 2)

    def _weights(self, patches: Tensor, significance: Tensor) -> Tensor:
        """Return the weight of each patch in each token: the aggregated ones, then that of all other patches."""
        kept = torch.zeros_like(significance, dtype=torch.bool)
        kept.scatter_(2, significance.topk(self.n_kept, dim=2).indices, True)
        logits = (self.scale * self.weigh(patches)).transpose(1, 2)  # (n, t, k)
        aggregated = logits[:, None].masked_fill(~kept[:, :, None], -torch.inf).softmax(3)
        others = significance.masked_fill(kept, -torch.inf).softmax(2)
        # Without other patches, all are NaN: the token is zero then.
        others = others.masked_fill(kept, 0.0)
        return torch.cat([aggregated, others[:, :, None].to(aggregated.dtype)], dim=2)


def _wide(rows: Tensor) -> Tensor:
    return rows.to(torch.promote_types(rows.dtype, torch.float32))
