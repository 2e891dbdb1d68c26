"""All recalibrators under one contract. A comparison fits those whose `fit_reads` are available.

Example:
    >>> import numpy as np
    >>> from calibjax.recalibrate import Predictions
    >>> data = Predictions(confidence=np.array([0.9, 0.8, 0.9, 0.6]), correct=np.array([1, 1, 0, 0]))
    >>> for name, method in METHODS.items():
    ...     if all(getattr(data, field) is not None for field in method.fit_reads):
    ...         state = method.fit(data)
    ...         print(name, method.apply(state, data).shape)
    confidence_temperature (4,)
    platt (4,)
    beta (4,)
    isotonic (4,)
    venn_abers (4,)
    histogram (4,)
    scaling_binning (4,)
"""

from calibjax.recalibrate import (
    affine,
    clipping,
    ensemble,
    few_shot,
    local,
    logistic,
    multicalibration,
    networks,
    steps,
    temperature,
)
from calibjax.recalibrate.contract import Method

METHODS: dict[str, Method] = {
    **temperature.METHODS,
    **ensemble.METHODS,
    **affine.METHODS,
    **networks.METHODS,
    **clipping.METHODS,
    **logistic.METHODS,
    **steps.METHODS,
    **local.METHODS,
    **few_shot.METHODS,
    **multicalibration.METHODS,
}
"""Name -> method, in the order of tables."""
