"""The multi-turn categories of the Berkeley function-calling benchmark, from its own wheel: data, simulated classes, checker.

`pip install --no-deps bfcl-eval` and `mpmath` are enough: all else that the wheel wants is for other categories and for
calling models.
"""

try:
    import bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker  # noqa: F401
    import mpmath  # noqa: F401  # of its simulated calculator
except ImportError as error:
    raise ImportError(
        f"{error.name} is not installed: pip install --no-deps bfcl-eval && pip install mpmath"
    ) from error
