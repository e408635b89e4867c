"""Summaries of a whole atlas: statistics of genes and cells, highly variable genes, normalization."""

from dasksc.summaries.gene_statistics import Statistics, statistics
from dasksc.summaries.normalization import normalize
from dasksc.summaries.variable_genes import highly_variable_genes

__all__ = ["Statistics", "highly_variable_genes", "normalize", "statistics"]
