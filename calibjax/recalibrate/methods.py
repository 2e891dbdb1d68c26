"""All recalibrators under one contract. A comparison is a loop: those whose `fit_reads` are at hand are fitted.

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
    histogram (4,)
    scaling_binning (4,)
"""

from calibjax.recalibrate import affine, clipping, ensemble, few_shot, local, logistic, networks, steps, temperature
from calibjax.recalibrate.contract import Method

_LOGITS, _LABELED_LOGITS = ("logits",), ("logits", "labels")
_CONFIDENCE, _LABELED_CONFIDENCE = ("confidence",), ("confidence", "correct")


def _of_logits(fit, apply, *, order: bool, max_classes: int | None = None, source: str) -> Method:
    return Method(fit, apply, _LABELED_LOGITS, _LOGITS, "log_probs", order, order, max_classes, source)


def _of_confidence(fit, apply, *, monotone: bool, source: str) -> Method:
    return Method(fit, apply, _LABELED_CONFIDENCE, _CONFIDENCE, "confidence", True, monotone, None, source)


METHODS: dict[str, Method] = {
    "temperature": _of_logits(temperature.fit, temperature.apply, order=True, source="Guo et al. 2017"),
    "ensemble_temperature": _of_logits(ensemble.fit, ensemble.apply, order=True, source="Zhang et al. 2020"),
    "vector": _of_logits(affine.fit_vector, affine.apply_vector, order=False, source="Guo et al. 2017"),
    "one_vs_rest_platt": _of_logits(
        affine.fit_one_vs_rest,
        affine.apply_one_vs_rest,
        order=False,
        max_classes=affine.MAX_REGRESSIONS,
        source="Zadrozny and Elkan 2002",
    ),
    "matrix": _of_logits(
        affine.fit_matrix, affine.apply_matrix, order=False, max_classes=affine.MAX_CLASSES, source="Guo et al. 2017"
    ),
    "dirichlet": _of_logits(
        affine.fit_dirichlet,
        affine.apply_dirichlet,
        order=False,
        max_classes=affine.MAX_CLASSES,
        source="Kull et al. 2019",
    ),
    "g_layers": _of_logits(networks.fit_g_layers, networks.apply_g_layers, order=False, source="Rahimi et al. 2020"),
    "ats": Method(
        networks.fit_ats,
        networks.apply_ats,
        ("logits", "features", "labels"),
        ("logits", "features"),
        "log_probs",
        keeps_argmax=True,
        monotone=True,
        max_classes=None,
        source="Xie et al. 2024, arXiv 2409.19817",
    ),
    "feature_clipping": Method(
        clipping.fit,
        clipping.apply,
        ("features", "unembedding", "labels"),
        ("features", "unembedding"),
        "log_probs",
        keeps_argmax=False,
        monotone=False,
        max_classes=None,
        source="Tao et al. 2025, arXiv 2410.19796",
    ),
    "confidence_temperature": _of_confidence(
        logistic.fit_odds, logistic.apply_odds, monotone=True, source="Guo et al. 2017"
    ),
    "platt": _of_confidence(logistic.fit_platt, logistic.apply_platt, monotone=True, source="Platt 1999"),
    "beta": _of_confidence(logistic.fit_beta, logistic.apply_beta, monotone=True, source="Kull et al. 2017"),
    "isotonic": _of_confidence(
        steps.fit_isotonic, steps.apply_isotonic, monotone=True, source="Zadrozny and Elkan 2002"
    ),
    "histogram": _of_confidence(
        steps.fit_histogram, steps.apply_histogram, monotone=False, source="Zadrozny and Elkan 2001"
    ),
    "scaling_binning": _of_confidence(
        steps.fit_scaling_binning, steps.apply_scaling_binning, monotone=True, source="Kumar et al. 2019"
    ),
    "lore": Method(
        local.fit,
        local.apply,
        ("confidence", "correct", "features"),
        ("confidence", "features"),
        "confidence",
        keeps_argmax=True,
        monotone=False,
        max_classes=None,
        source="Luo et al. 2022, arXiv 2102.10809",
    ),
    "few_shot": Method(
        few_shot.fit,
        few_shot.apply,
        ("confidence", "correct", "slices"),
        ("confidence", "slices"),
        "confidence",
        keeps_argmax=True,
        monotone=False,
        max_classes=None,
        source="Li et al. 2024, arXiv 2403.18286",
    ),
}
"""Name -> method."""
