"""The methods as classes with the interface of scikit-learn and netcal: `fit`, `predict_proba`, `transform`.

X is the first field a method reads (NumPy, pandas, torch): logits `[N, K]`, confidences `[N]` or `[N, C]`, features.
"""

import inspect
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import numpy as np

from calibjax.recalibrate.contract import Predictions, class_count
from calibjax.recalibrate.methods import METHODS
from calibjax.recalibrate.saved import Recalibrator
from calibjax.runtime.arrays import as_array
from calibjax.runtime.errors import UserError


class Estimator:
    """A method of `METHODS` as an estimator of scikit-learn, which need not be installed.

    Attributes:
        method: name in `METHODS`.
        options: the options of its `fit`, which are the parameters of the class, with their defaults.
        classes_: after `fit`, of a method that reads logits: the label of each column.
        recalibrator_: after `fit`, the `Recalibrator`, whose `state` `save` stores.
    """

    method: ClassVar[str]
    options: ClassVar[Mapping[str, Any]]
    classes_: np.ndarray
    n_features_in_: int
    recalibrator_: Recalibrator

    def __init__(self, **options: Any) -> None:
        self.__dict__.update(self.options)
        self.set_params(**options)

    def fit(self, X: Any, y: Any, where: Any = None, **fields: Any) -> Self:
        """Fits the method; raises `UserError` as `Method.fit` does.

        Args:
            X: logits `[N, K]`, confidences `[N]` or `[N, 1]`, or features, by the method.
            y: the labels `[N]`. For logits: the numbers of columns, or K distinct values in the order of the columns.
                For confidences: right (1) or wrong (0), or a fraction.
            where: bool `[N]`, False for rows that do not count.
            fields: further fields of `Predictions` that the method reads.
        """
        method = METHODS[self.method]
        truth = np.ravel(as_array(y))
        data = self._predictions(X, fields)
        if method.returns == "log_probs":
            if np.ndim(X) != 2:
                raise UserError(f"X: expected two axes, got the shape {np.shape(X)}.")
            width = class_count(data)
            self.classes_ = np.arange(width)
            if not np.issubdtype(truth.dtype, np.integer):
                # `Method.fit` refuses a mask of another shape.
                counts = as_array(where).astype(bool) if np.shape(where) == truth.shape else np.ones(len(truth), bool)
                self.classes_ = np.unique(truth[counts])
                if len(self.classes_) != width:
                    raise UserError(f"y: expected {width} distinct labels, one a column, got {len(self.classes_)}.")
                truth = np.searchsorted(self.classes_, np.where(counts, truth, self.classes_[0]))
            data = data._replace(labels=truth)
        else:
            self.classes_ = np.arange(2)
            data = data._replace(correct=truth)
        state = method.fit(data, where, **self.get_params())
        self.n_features_in_ = 1 if np.ndim(X) == 1 else np.shape(X)[1]
        self.recalibrator_ = Recalibrator(self.method, state, {})
        return self

    def transform(self, X: Any, **fields: Any) -> np.ndarray:
        """Calibrated confidences, float32 `[N]`; for logits, probabilities `[N, K]`."""
        if not hasattr(self, "recalibrator_"):
            try:
                from sklearn.exceptions import NotFittedError
            except ImportError:
                NotFittedError = UserError
            raise NotFittedError(f"{type(self).__name__}: call fit first.")
        width = 1 if np.ndim(X) == 1 else np.shape(X)[1]
        if width != self.n_features_in_:
            expected = f"{type(self).__name__} is expecting {self.n_features_in_} features as input"
            raise UserError(f"X has {width} features, but {expected}")
        values = self.recalibrator_(self._predictions(X, fields))
        return np.exp(values) if METHODS[self.method].returns == "log_probs" else values

    def predict_proba(self, X: Any, **fields: Any) -> np.ndarray:
        """Calibrated probabilities, float32: of the classes `[N, K]`; for confidences, of wrong and right `[N, 2]`."""
        values = self.transform(X, **fields)
        return values if values.ndim == 2 else np.stack([1 - values, values], axis=1)

    def predict(self, X: Any, **fields: Any) -> np.ndarray:
        """The most likely class of `classes_`, `[N]`."""
        best = self.predict_proba(X, **fields).argmax(axis=1)
        return self.classes_[best]

    def score(self, X: Any, y: Any, **fields: Any) -> float:
        """The accuracy of `predict`."""
        return float(np.mean(self.predict(X, **fields) == np.ravel(as_array(y))))

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The options by name."""
        return {name: getattr(self, name) for name in self.options}

    def set_params(self, **params: Any) -> Self:
        """Sets options; raises ValueError for one that the method does not have."""
        for name, value in params.items():
            if name not in self.options:
                raise ValueError(f"{type(self).__name__}: expected options among {list(self.options)}, got {name}.")
            setattr(self, name, value)
        return self

    def __repr__(self) -> str:
        changed = {name: value for name, value in self.get_params().items() if value != self.options[name]}
        arguments = [f"{name}={value!r}" for name, value in changed.items()]
        return f"{type(self).__name__}({', '.join(arguments)})"

    def __sklearn_tags__(self) -> Any:
        from sklearn.utils import ClassifierTags, InputTags, Tags, TargetTags, TransformerTags

        tags = Tags("classifier", TargetTags(required=True), TransformerTags(), ClassifierTags())
        tags.input_tags = InputTags(one_d_array=METHODS[self.method].apply_reads[0] == "confidence")
        return tags

    def _predictions(self, X: Any, fields: Mapping[str, Any]) -> Predictions:
        first, *others = METHODS[self.method].apply_reads
        unknown = sorted(set(fields) - set(others))
        if unknown:
            raise UserError(f"{type(self).__name__}: {', '.join(unknown)}: expected {', '.join([first, *others])}.")
        values = as_array(X)
        if first == "confidence" and values.ndim == 2 and values.shape[1] == 1:
            values = values[:, 0]
        return Predictions(**{first: values}, **fields)


def _estimator(name: str, method: str) -> type[Estimator]:
    fit = METHODS[method].fit_arrays
    parameters = inspect.signature(fit).parameters.values()
    options = [parameter for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]

    def __init__(self: Estimator, **values: Any) -> None:
        Estimator.__init__(self, **values)

    this = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    __init__.__signature__ = inspect.Signature([this, *options])  # pyright: ignore[reportFunctionMemberAccess]
    body = {
        "__init__": __init__,
        "__doc__": f"{inspect.getdoc(fit)}\n\nAs an `Estimator`: `{name}().fit(X, y).predict_proba(X)`.",
        "__module__": __name__,
        "method": method,
        "options": {option.name: option.default for option in options},
    }
    return type(name, (Estimator,), body)


TemperatureScaling = _estimator("TemperatureScaling", "temperature")
EnsembleTemperatureScaling = _estimator("EnsembleTemperatureScaling", "ensemble_temperature")
VectorScaling = _estimator("VectorScaling", "vector")
OneVsRestPlattScaling = _estimator("OneVsRestPlattScaling", "one_vs_rest_platt")
MatrixScaling = _estimator("MatrixScaling", "matrix")
StructuredMatrixScaling = _estimator("StructuredMatrixScaling", "structured_matrix")
DirichletCalibration = _estimator("DirichletCalibration", "dirichlet")
GLayers = _estimator("GLayers", "g_layers")
MlpTemperatureScaling = _estimator("MlpTemperatureScaling", "mlp_temperature")
FeatureClipping = _estimator("FeatureClipping", "feature_clipping")
ConfidenceTemperatureScaling = _estimator("ConfidenceTemperatureScaling", "confidence_temperature")
PlattScaling = _estimator("PlattScaling", "platt")
BetaCalibration = _estimator("BetaCalibration", "beta")
IsotonicCalibration = _estimator("IsotonicCalibration", "isotonic")
VennAbersCalibration = _estimator("VennAbersCalibration", "venn_abers")
HistogramBinning = _estimator("HistogramBinning", "histogram")
ScalingBinning = _estimator("ScalingBinning", "scaling_binning")
Multicalibration = _estimator("Multicalibration", "multicalibration")
Stacking = _estimator("Stacking", "stacking")
