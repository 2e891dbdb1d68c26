"""The operator at the heart: statistics of the logits over the vocabulary, without the logits."""

from calibjax.kernels.api import IMPLEMENTATIONS as IMPLEMENTATIONS
from calibjax.kernels.api import vocab_stats as vocab_stats
from calibjax.kernels.cross_entropy import linear_cross_entropy as linear_cross_entropy
from calibjax.kernels.divergence import kl_divergences as kl_divergences
from calibjax.kernels.explain import explain as explain
from calibjax.kernels.sharded import VocabSharding as VocabSharding
from calibjax.kernels.stats import STATISTICS as STATISTICS
from calibjax.kernels.stats import VocabStats as VocabStats
from calibjax.kernels.top_k import TopLogits as TopLogits
from calibjax.kernels.top_k import top_logits as top_logits
