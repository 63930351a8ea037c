"""Search: encode images and captions once, find candidates by pooled vectors, rank them by the model's own score.

`index` has the public class, and `opened` its part that reads. `changing` builds and changes an index from `sources`,
`writing` makes a change take effect in one step, and `segments`, `mapped`, `rows` and `manifest` define its files.
`snapshot` is one state of it, `lookup` finds items by id, `searching` finds the best ones, and `queries` checks and
encodes what is asked. `members` holds the models, `pooling` and `learning` make pooled vectors, `calibration` chooses
the number of candidates, and `checking` finds damage. `encoders` encodes pictures with a separate vision model, and
`remote` searches services elsewhere.
"""

from itm_fast.search.calibration import calibrate, recalls
from itm_fast.search.checking import check
from itm_fast.search.encoders import encoder_kind
from itm_fast.search.index import Index
from itm_fast.search.manifest import is_index
from itm_fast.search.members import fingerprint
from itm_fast.search.results import Hit, Item, Results

__all__ = [
    "Hit",
    "Index",
    "Item",
    "Results",
    "calibrate",
    "check",
    "encoder_kind",
    "fingerprint",
    "is_index",
    "recalls",
]
