"""`NegativeAwareSimilarity`: NAAF's similarity, in which words without a matching region count against a pair."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from itm_fast import reference
from itm_fast.fragments import Fragments
from itm_fast.nn.padded_pairs import padded_sets, pair_products, region_attention
from itm_fast.reference import validation

__all__ = ["NegativeAwareSimilarity"]

# Share of a batch in the thresholds, and the tiny numbers of the official code.
_SHARE, _EPSILON = 0.7, 1e-8


class NegativeAwareSimilarity(nn.Module):
    """Score pairs by negative and positive attention of words to regions, for use in `gradient_sparse_scores`.

    With the inner products `s_jk` of words and regions and a threshold t, the score is the mean over the words of

    1. negative attention: `b_j = max_k s_jk - t`, if it is below 0;
    2. the cosine of word j with `sum_k p_jk x_k`, where p is `softmax(temperature s_jk)` over the regions with
       `s_jk > t`; 0 without such regions;
    3. `sum_k q_jk s_jk`, where q is SCAN's attention: s, clipped by a leaky ReLU, is l2-normalised over the words, then
       `softmax(temperature ...)` over the regions.

    In evaluation mode, t is a second, safe threshold, and `b_j` counts if the mean of the b of the caption, with the
    weights `softmax_i(intra_temperature <w_j, w_i>)`, is below 0. Words have norm 1.

    Both thresholds are statistics that `update` learns from batches, not weights.

    Args:
        temperature: inverse temperature of both attentions.
        negative_slope: of the leaky ReLU.
        intra_temperature: inverse temperature of the relations between the words of a caption.
        penalty: weight of the mismatched words beside the matched ones where the threshold is learned, above 0.
        threshold_words: number of words from which the thresholds are learned; a batch with fewer sets both to 0.

    Source: Zhang et al., "Negative-Aware Attention Framework for Image-Text Matching" (CVPR 2022), in the form of its
    official code.
    """

    threshold: Tensor
    safe_threshold: Tensor

    def __init__(
        self,
        *,
        temperature: float = 20.0,
        negative_slope: float = 0.1,
        intra_temperature: float = 5.0,
        penalty: float = 2.0,
        threshold_words: int = 200,
    ) -> None:
        super().__init__()
        self.temperature = validation.finite_number("temperature", temperature)
        self.negative_slope = validation.finite_number("negative_slope", negative_slope)
        self.intra_temperature = validation.finite_number("intra_temperature", intra_temperature)
        self.penalty = validation.finite_number("penalty", penalty, minimum=0.0, non_zero=True)
        validation.check_count("threshold_words", threshold_words)
        self.threshold_words = threshold_words
        self.register_buffer("threshold", torch.zeros(()))
        self.register_buffer("safe_threshold", torch.zeros(()))

    def forward(self, images: Fragments, captions: Fragments) -> Tensor:
        """Score regions and words: (n_images, n_captions) float32 (float64 for float64); 0 for an empty set."""
        validation.check_fragments("images", images)
        validation.check_fragments("captions", captions)
        with torch.autocast(images.device.type, enabled=False):
            regions, seen, k = padded_sets(images)
            words, inside, lengths = padded_sets(captions)
            products = pair_products(regions, words)
            found = self._negative(products, words, seen, inside) + self._positive(products, regions, seen)
            found = found + (self._relations(products, seen) * products).sum(dim=3)
            scores = (found * inside).sum(dim=2) / lengths.clamp(min=1)
            return scores.masked_fill((k == 0)[:, None] | (lengths == 0), 0.0)

    def weights(self, words: Tensor, regions: Tensor) -> Tensor:
        """Return the attention q (n, k) of the words (n, d) of one pair to its regions (k, d)."""
        seen = torch.ones(1, len(regions), dtype=torch.bool, device=regions.device)
        return self._relations(pair_products(regions[None], words[None]), seen)[0, 0]

    def steps(self, words: Tensor, regions: Tensor) -> reference.RegulationSteps:
        """Return what `RegulatedSimilarity.steps` does: the attention q with its temperature, and no aggregation."""
        weights = self.weights(words, regions)
        return reference.RegulationSteps([weights], [weights.new_full((len(words),), self.temperature)], [])

    def _negative(self, products: Tensor, words: Tensor, seen: Tensor, inside: Tensor) -> Tensor:
        threshold = self.threshold if self.training else self.safe_threshold
        best = products.masked_fill(~seen[:, None, None], -torch.inf).amax(dim=3) - threshold
        if self.training:
            return best * (best < 0)
        raw = self.intra_temperature * (words @ words.transpose(1, 2))
        relations = raw.masked_fill(~inside[:, None], -torch.inf).softmax(dim=2)
        return best * (torch.einsum("mij,nmj->nmi", relations, best) < 0)

    def _positive(self, products: Tensor, regions: Tensor, seen: Tensor) -> Tensor:
        threshold = self.threshold if self.training else self.safe_threshold
        kept = (products > threshold) & seen[:, None, None]
        none = ~kept.any(dim=3)
        logits = (self.temperature * products).masked_fill(~kept, -torch.inf).masked_fill(none[..., None], 0.0)
        weights = logits.softmax(dim=3).masked_fill(none[..., None], 0.0)
        # The attended vector c has <w, c> = p.s and |c|^2 = p^T G p, G the Gram matrix of the regions.
        spread = (weights.flatten(1, 2) @ (regions @ regions.transpose(1, 2))).view_as(weights)
        squares = (weights * spread).sum(dim=3).masked_fill(none, 1.0)
        return (weights * products).sum(dim=3) / squares.clamp(min=_EPSILON**2).sqrt()

    def _relations(self, products: Tensor, seen: Tensor) -> Tensor:
        return region_attention(products, seen, self.temperature, self.negative_slope)

    @torch.no_grad()
    def statistics(self, images: Fragments, captions: Fragments, scores: Tensor, first: int) -> Tensor:
        """Return what `update` needs of the captions of a batch; add it up if several processes share a batch.

        Only captions that rank their own image first count. A word's best product with its own image is a matched one;
        that with the image of the lowest score is a mismatched one.

        Args:
            images: all images of the batch. captions: those of this process.
            scores: (n_images, n_captions).
            first: index of the image of the first caption.

        Returns:
            Five numbers, float64: the count of words, and the sums and sums of squares of both products.
        """
        validation.check_fragments("images", images)
        validation.check_fragments("captions", captions)
        own = first + torch.arange(len(captions), device=scores.device)
        counted = scores.argmax(dim=0) == own if len(captions) else own > own
        chosen = captions.index_select(counted.nonzero()[:, 0])
        sums = [scores.new_tensor(float(chosen.values.shape[0]), dtype=torch.float64)]
        for numbers in (own[counted], scores.argmin(dim=0)[counted] if len(captions) else own):
            words, inside, _ = padded_sets(chosen)
            regions, seen, _ = padded_sets(images.index_select(numbers))
            best = (words @ regions.transpose(1, 2)).masked_fill(~seen[:, None], -torch.inf).amax(dim=2)
            best = best.double().masked_fill(~inside, 0.0)
            sums += [best.sum(), best.square().sum()]
        return torch.stack(sums)

    @torch.no_grad()
    def update(self, statistics: Tensor) -> None:
        """Learn the thresholds from the statistics of a batch.

        The products of matched words and those of mismatched ones are taken for normal distributions (m+, s+) and (m-,
        s-). The threshold is where the density of the former equals `penalty` times that of the latter, and the safe
        one is `m+ - 3 s+`. Values outside [0, 1] become 0. Batches are averaged with weights 0.7 (new) and 0.3.
        """
        count, *sums = statistics.double()
        (matched, matched_variance), (mismatched, mismatched_variance) = (
            (total / count, (squares - total.square() / count).clamp(min=0.0) / (count - 1))
            for total, squares in (sums[:2], sums[2:])
        )
        a = matched_variance - mismatched_variance
        b = 2 * (matched * mismatched_variance - mismatched * matched_variance)
        ratio = mismatched_variance.sqrt() / (self.penalty * matched_variance.sqrt()) + _EPSILON
        c = mismatched.square() * matched_variance - matched.square() * mismatched_variance
        c = c + 2 * matched_variance * mismatched_variance * ratio.log()
        root = b.square() - 4 * a * c
        boundary = (root.clamp(min=0.0).sqrt() - b) / (2 * a + 1e-10)
        safe = matched - 3 * matched_variance.sqrt()
        for kept, new in ((self.threshold, boundary), (self.safe_threshold, safe)):
            old = kept.double()
            new = torch.where(root > 0, new, old)
            mixed = _SHARE * torch.where((new < 0) | (new > 1), 0.0, new) + (1 - _SHARE) * old
            kept.copy_(torch.where(count > self.threshold_words, mixed, old * (count == self.threshold_words)))

    def extra_repr(self) -> str:
        names = ("temperature", "negative_slope", "intra_temperature", "penalty", "threshold_words")
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
