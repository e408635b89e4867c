"""Options generated from the signatures of public functions, for command lines and YAML files.

`Parser.add_options` reads signatures from source files, so no option takes the import of anndata, numba or torch:

    parser = Parser("dasksc info", "Describe an atlas.")
    parser.add_options("open", skip=("data",))
    parser.add_options("scDataset", prefix="data.", skip=("data_collection",))
    options = parser.parse_args(["--join", "outer", "--data.batch_size", "128"])
    adata = dasksc.open("atlas.h5ad", **arguments_of("open", options))
"""

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
