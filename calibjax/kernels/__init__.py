"""`vocab_stats`, `vocab_curves`, `linear_cross_entropy`: sums over the vocabulary, of logits that are not stored."""

from calibjax.kernels.api import IMPLEMENTATIONS as IMPLEMENTATIONS
from calibjax.kernels.api import explain as explain
from calibjax.kernels.api import vocab_stats as vocab_stats
from calibjax.kernels.cross_entropy import linear_cross_entropy as linear_cross_entropy
from calibjax.kernels.curves import DOUBLED_SCALES as DOUBLED_SCALES
from calibjax.kernels.curves import SCALES as SCALES
from calibjax.kernels.curves import VocabCurves as VocabCurves
from calibjax.kernels.curves import vocab_curves as vocab_curves
from calibjax.kernels.divergence import kl_divergences as kl_divergences
from calibjax.kernels.sharded import VocabSharding as VocabSharding
from calibjax.kernels.stats import STATISTICS as STATISTICS
from calibjax.kernels.stats import VocabStats as VocabStats
from calibjax.kernels.top_k import top_logits as top_logits
