"""Options for command lines and YAML files, generated from the signatures of functions and classes."""

from dasksc.options.parser import Parser, arguments_of
from dasksc.options.signatures import NOT_LITERAL, REQUIRED, Parameter, parameters_of
from dasksc.options.values import InvalidValue, nearest, parse

__all__ = [
    "NOT_LITERAL",
    "REQUIRED",
    "InvalidValue",
    "Parameter",
    "Parser",
    "arguments_of",
    "nearest",
    "parameters_of",
    "parse",
]
