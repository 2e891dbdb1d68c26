"""`vocab_stats`, `vocab_curves`, `linear_cross_entropy`: sums over the vocabulary, of logits that are not stored."""

from calibjax.kernels.api import IMPLEMENTATIONS, explain, vocab_stats
from calibjax.kernels.cross_entropy import linear_cross_entropy
from calibjax.kernels.curves import SCALES, VocabCurves, vocab_curves
from calibjax.kernels.divergence import kl_divergences
from calibjax.kernels.sharded import VocabSharding
from calibjax.kernels.stats import STATISTICS, VocabStats
from calibjax.kernels.top_k import top_logits

__all__ = [
    "IMPLEMENTATIONS",
    "SCALES",
    "STATISTICS",
    "VocabCurves",
    "VocabSharding",
    "VocabStats",
    "explain",
    "kl_divergences",
    "linear_cross_entropy",
    "top_logits",
    "vocab_curves",
    "vocab_stats",
]
