"""calibjax: measure and improve the calibration of large language models in JAX.

Example:
    lm = calibjax.load_model("path/to/model")
    fit, held_out = calibjax.split_sequences(calibjax.load_text("data.jsonl", lm), 0.6)
    fitted = calibjax.fit_ats(lm, fit)
    print(calibjax.evaluate(lm, held_out, fitted.heads))
"""

import lazy_loader

import calibjax.runtime  # noqa: F401 - leaves out the TPU plugin where there is no TPU; imports no JAX

# The public names are those of __init__.pyi; each is imported where it is first used.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
