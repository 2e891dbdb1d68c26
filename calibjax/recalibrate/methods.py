"""All recalibrators under one contract. A comparison fits those whose `fit_reads` are available.

Example:
    >>> import numpy as np
    >>> from calibjax.recalibrate import Predictions
    >>> data = Predictions(confidence=np.array([0.9, 0.9, 0.9, 0.9]), correct=np.array([1, 1, 1, 0]))
    >>> state = METHODS["platt"].fit(data)
    >>> np.asarray(METHODS["platt"].apply(state, data)).round(3).tolist()
    [0.75, 0.75, 0.75, 0.75]
"""

from calibjax.recalibrate import affine, features, logistic, multicalibration, networks, nonparametric, temperature
from calibjax.recalibrate.contract import Method

_CLASSES, _BINARY = ("logits", "labels"), ("confidence", "correct")
_MAX_DENSE = 1024  # classes of the methods with a K by K matrix: L-BFGS keeps 40 vectors of K² numbers
_MAX_FITS = 4096  # classes of one-vs-rest Platt scaling, each a logistic regression of its own

METHODS: dict[str, Method] = {
    "temperature": Method(temperature.fit, temperature.apply, _CLASSES, keeps_argmax=True),
    "ensemble_temperature": Method(temperature.fit_ensemble, temperature.apply_ensemble, _CLASSES, keeps_argmax=True),
    "vector": Method(affine.fit_vector, affine.apply_vector, _CLASSES),
    "one_vs_rest_platt": Method(affine.fit_one_vs_rest, affine.apply_one_vs_rest, _CLASSES, max_classes=_MAX_FITS),
    "matrix": Method(affine.fit_matrix, affine.apply_matrix, _CLASSES, max_classes=_MAX_DENSE),
    "structured_matrix": Method(affine.fit_structured, affine.apply_structured, _CLASSES, max_classes=_MAX_DENSE),
    "dirichlet": Method(affine.fit_dirichlet, affine.apply_dirichlet, _CLASSES, max_classes=_MAX_DENSE),
    "g_layers": Method(networks.fit_g_layers, networks.apply_g_layers, _CLASSES),
    "mlp_temperature": Method(
        networks.fit_mlp_temperature,
        networks.apply_mlp_temperature,
        ("logits", "features", "labels"),
        keeps_argmax=True,
    ),
    "feature_clipping": Method(features.fit_clipping, features.apply_clipping, ("features", "unembedding", "labels")),
    "confidence_temperature": Method(
        logistic.fit_confidence_temperature, logistic.apply_confidence_temperature, _BINARY
    ),
    "platt": Method(logistic.fit_platt, logistic.apply_platt, _BINARY),
    "beta": Method(logistic.fit_beta, logistic.apply_beta, _BINARY),
    "isotonic": Method(nonparametric.fit_isotonic, nonparametric.apply_isotonic, _BINARY),
    "venn_abers": Method(nonparametric.fit_venn_abers, nonparametric.apply_venn_abers, _BINARY),
    "histogram": Method(nonparametric.fit_histogram, nonparametric.apply_histogram, _BINARY),
    "scaling_binning": Method(nonparametric.fit_scaling_binning, nonparametric.apply_scaling_binning, _BINARY),
    "multicalibration": Method(multicalibration.fit, multicalibration.apply, (*_BINARY, "categories")),
    "stacking": Method(logistic.fit_stacking, logistic.apply_stacking, ("confidences", "correct")),
}
"""Name -> method, in the order of tables."""
